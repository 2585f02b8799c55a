"""What is measured is what happened: the plan's arithmetic, disk and page cache, and arms against each other."""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
import pytest

from benchmarks import plot_arms, slow_disk
from edge0_runtime import cli
from edge0_runtime.arms import ARMS
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.machine import memory_limit_bytes
from edge0_runtime.engine import Engine
from edge0_runtime.experts.store import ExpertStore
from edge0_runtime.host.disk import disk_speed
from edge0_runtime.host.memory import (
    drop_page_cache,
    page_cache_bytes,
    peak_rss_bytes,
    process_io,
    reset_peak_rss,
    rss_bytes,
)
from edge0_runtime.measure.ab import compare, ratios, table
from edge0_runtime.measure.bench import run
from edge0_runtime.plan import MAX_GATHERED_ROWS, Keeping, largest_chunk, make_plan
from edge0_runtime.serving import find_adapters
from tests.mlx_memory import mlx_bytes

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells; other systems may not")


# -- the plan ----------------------------------------------------------------------------------------------


def test_the_plan_counts_everything_that_is_held(tiny_dir: Path, store: ExpertStore) -> None:
    tier = find_adapters(tiny_dir, prerouter=True, lora=False, tier_name=None).tier
    known = {
        "resident_bytes": 10**6,
        "adapter_bytes": 10**5,
        "predicted_layers": 2,
        "float32": False,
        "keeping": Keeping(257),
    }
    whole = make_plan(tier, store, budget_bytes=None, **known)
    assert whole.full and whole.budget_bytes == whole.fixed_bytes + 32 * 13_824 and whole.fixed_bytes > 1_100_000
    assert make_plan(tier, store, budget_bytes=10**12, **known).slots == 32
    with pytest.raises(Edge0Error, match=r"memory_budget.*hold no expert.*give at least") as refusal:
        make_plan(tier, store, budget_bytes=10**6, **known)
    least = math.ceil(float(re.search(r"give at least (\S+?),", str(refusal.value))[1]) * 2**30 / 1000) * 1000
    seen = set()
    for budget in range(least, whole.budget_bytes + 1, 6_007):
        plan = make_plan(tier, store, budget_bytes=budget, **known)
        seen.add(plan.slots)
        assert plan.slot_nbytes == plan.expert_nbytes == 13_824 and plan.predicted_experts == 4
        assert plan.fixed_bytes + plan.slots * 13_824 <= budget
        assert plan.full or budget < plan.fixed_bytes + (plan.slots + 1) * 13_824
        # 4 layers x K = 2; a step's experts must fit for a quarter of them to be there from the last one
        repeated = 0.75 if plan.slots >= 8 else 1
        assert plan.bytes_per_token == (0 if plan.full else 8 * 13_824 * repeated)
    assert least > 1_100_000
    assert seen >= {1, 7, 8, 31}
    # float32 scales and biases: 6 of them, 2 more bytes for each
    assert make_plan(tier, store, budget_bytes=None, **(known | {"float32": True})).slot_nbytes == 15_360


def test_the_plan_is_kept(tiny_dir: Path, budget: Callable[..., float]) -> None:
    """What MLX holds after loading is what the plan says, but for the activations, which aren't there yet."""
    gib = budget(tiny_dir, 9)
    before = mlx_bytes()
    with Engine.load(tiny_dir, memory_budget=gib) as engine:
        plan = engine.model.plan
        assert plan is not None and plan.budget_bytes == int(gib * 2**30)
        held = mx.get_active_memory() - before
        promised = plan.resident_bytes + plan.adapter_bytes + plan.slots * plan.slot_nbytes
        assert abs(held - promised) < 60_000  # rounding to pages, small tables, rotary frequencies
        for text in ("memory budget", "9 of 32 experts fit", "a token needs 8, 4 of them known a token ahead"):
            assert text in plan.text()
        assert json.loads(json.dumps(plan.to_dict()))["slots"] == 9


def test_garbage_from_before_is_no_memory_given_back() -> None:
    """The collector may run at any time: here, after the first look."""
    gc.disable()
    try:
        cycle: list[Any] = [mx.eval(array := mx.zeros(2**18)), array]
        cycle.append(cycle)
        del cycle, array
        before = mlx_bytes()
        gc.collect()
        assert mx.get_active_memory() == before
    finally:
        gc.enable()


def test_no_pass_gathers_more_rows_than_mlx_computes_right(tiny_dir: Path) -> None:
    tier = find_adapters(tiny_dir, prerouter=True, lora=False, tier_name=None).tier
    assert largest_chunk(tier) * tier.k <= MAX_GATHERED_ROWS


def test_packed_weights_stay_packed_unless_all_experts_fit(tiny_dir: Path, budget: Callable[..., float]) -> None:
    for slots, kind in ((9, mx.bfloat16), (32, mx.float32)):
        with Engine.load(tiny_dir, memory_budget=budget(tiny_dir, slots)) as engine:
            modules = dict(engine.model.network.named_modules())
            embedding = modules["language_model.model.embed_tokens"]
            assert embedding.weight.dtype == mx.uint32 and embedding.scales.dtype == mx.float32
            projection = modules["language_model.model.layers.0.mlp.shared_expert.up_proj"].linear  # below the LoRA
            assert projection.weight.dtype == mx.uint32 and projection.scales.dtype == kind


# -- disk and memory ---------------------------------------------------------------------------------------


def test_disk_speed_reads_each_expert_once(store: ExpertStore) -> None:
    speed = disk_speed(store, threads=3, max_bytes=10 * 13_824)
    if speed is None:
        pytest.skip("this file system has no direct reads")
    assert (speed.threads, speed.experts, speed.nbytes) == (3, 10, 10 * 13_824)
    assert speed.bytes_per_second > 0 and math.isclose(speed.ms_per_expert, 100 * speed.seconds)
    whole = disk_speed(store, threads=1, max_bytes=10**12)
    assert whole is not None and whole.experts == 32


@linux
def test_the_page_cache_is_seen_and_dropped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1_000_000))
    os.sync()  # only clean pages can be dropped
    path.read_bytes()
    pages = -(-1_000_000 // 4096) * 4096
    if page_cache_bytes([path]) != pages:
        pytest.skip("this file system has no page cache")
    assert drop_page_cache([path])
    assert page_cache_bytes([path]) == 0
    with path.open("rb", buffering=0) as file:
        file.read(4096)
    assert 0 < (page_cache_bytes([path]) or 0) <= pages


@linux
def test_process_numbers(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(300_000))
    before = process_io()
    path.read_bytes()
    after = process_io()
    assert before is not None and after is not None and after.requested - before.requested >= 300_000
    reset_peak_rss()
    memory = bytearray(50_000_000)
    assert peak_rss_bytes() >= rss_bytes() >= len(memory)


# -- arms against each other -------------------------------------------------------------------------------


def test_arms_take_turns_on_the_same_tokens(
    tiny_dir: Path, budget: Callable[..., float], prompts: list[list[int]]
) -> None:
    with (
        Engine.load(tiny_dir, memory_budget=budget(tiny_dir, 12)) as engine,
        Engine.load(tiny_dir, arm="resident") as resident,
    ):
        rows = list(
            compare(engine, prompts[1:3], arms=ARMS, max_tokens=6, rounds=2, page_cache="run", resident=resident)
        )
    order = [row["arm"] for row in rows if row["prompt"] == 0]
    assert order == [*ARMS, *ARMS[::-1]] * 2
    assert json.loads(json.dumps(rows)) == rows
    for row in rows:
        same = [other for other in rows if other["prompt"] == row["prompt"]]
        assert all(other["tokens"] == row["tokens"] for other in same)
        assert row["dropped_experts"] == 0 and row["page_cache"] == "run"
        # every run begins without experts: each arm reads the same number in each of its runs
        assert len({other["decode_expert_misses"] for other in same if other["arm"] == row["arm"]}) == 1
    assert len(ratios(rows, "prerouter", "on_demand")) == 8
    assert ratios(rows, "history", "history") == [1.0] * 8
    text = table(rows, "on_demand").splitlines()
    assert [line.split()[0] for line in text[1 : 1 + len(ARMS)]] == list(ARMS)


def test_a_run_counts_bytes_waits_and_overlap(
    tiny_dir: Path, budget: Callable[..., float], prompts: list[list[int]]
) -> None:
    with Engine.load(tiny_dir, memory_budget=budget(tiny_dir, 1)) as engine:
        row = run(engine, prompts[2], max_tokens=6, page_cache="token")
        steps = list(engine.generate(prompts[2], max_tokens=6, ignore_eos=True, trace=True))
    assert row["tokens"] == row["greedy"] == [step.token for step in steps]
    shared = [
        len(set(now) & set(before)) / 2
        for one, other in itertools.pairwise(steps[1:])
        for before, now in zip(one.experts, other.experts, strict=True)
    ]
    assert row["expert_overlap"] == pytest.approx(sum(shared) / len(shared))
    assert len(row["decode_step_ms"]) == len(row["decode_blocked_ms"]) == 5
    assert all(
        0 <= blocked <= step for blocked, step in zip(row["decode_blocked_ms"], row["decode_step_ms"], strict=True)
    )
    if sys.platform == "linux":
        assert row["process_requested_bytes"] >= row["decode_expert_bytes_per_step"] * 5


def test_an_arm_that_is_exact_must_choose_the_same_tokens(
    tiny_dir: Path, budget: Callable[..., float], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.load(tiny_dir, memory_budget=budget(tiny_dir, 12)) as engine:
        comparing = compare(
            engine, prompts[1:2], arms=("on_demand", "history"), max_tokens=4, rounds=1, page_cache="keep"
        )
        next(comparing)
        norm = engine.model.network.language_model.model.norm
        norm.weight = -norm.weight
        mx.eval(norm.weight)
        with pytest.raises(Edge0Error, match="other greedy tokens"):
            list(comparing)


def test_bench_compares_arms_and_the_plots_show_them(
    tiny_dir: Path, budget: Callable[..., float], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    arguments = ["bench", str(tiny_dir), "--arms", "prerouter,resident,on_demand", "--rounds", "1", "--max-tokens", "4"]
    gib = str(budget(tiny_dir, 12))
    capsys.readouterr()
    assert cli.main([*arguments, "--prompt", "1+1", "--memory-budget", gib, "--json"]) == 0
    lines = capsys.readouterr().out
    assert [json.loads(line)["arm"] for line in lines.splitlines()] == [
        "prerouter",
        "resident",
        "on_demand",
        "on_demand",
        "resident",
        "prerouter",
    ]
    (tmp_path / "k2.jsonl").write_text(lines)
    monkeypatch.setattr(sys, "argv", ["plot_arms", str(tmp_path / "k2.jsonl"), "--out", str(tmp_path)])
    plot_arms.main()
    for name in ("speed", "step", "traffic", "memory"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "prerouter" in capsys.readouterr().out


def test_bench_refuses_arms_that_do_not_exist(tiny_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", str(tiny_dir), "--arms", "prerouter,faster"])
    assert "faster: choose of prerouter" in capsys.readouterr().err


def test_what_does_not_fit_is_refused_before_it_is_read(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge0_runtime.plan.memory_limit_bytes", lambda: 2**16)
    with pytest.raises(Edge0Error, match=r"arm resident: .* are needed .* choose one that streams"):
        Engine.load(tiny_dir, arm="resident")
    with pytest.raises(Edge0Error, match=r"memory_budget: .* are needed .* give less"):
        Engine.load(tiny_dir, memory_budget=4.0)


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_groups_limit_counts_and_those_above_it(tmp_path: Path, version: int) -> None:
    name, root = ("memory.limit_in_bytes", tmp_path / "memory") if version == 1 else ("memory.max", tmp_path)
    proc = tmp_path / "proc"
    proc.write_text("7:cpu:/other\n" + ("4:hugetlb,memory:/a/b\n0::/\n" if version == 1 else "0::/a/b\n"))
    (root / "a/b").mkdir(parents=True)
    unlimited = memory_limit_bytes(proc, tmp_path)
    assert unlimited == psutil.virtual_memory().total
    (root / "a/b" / name).write_text(str(10**9) if version == 1 else "max")
    (root / "a" / name).write_text(f"{10**8}\n")
    assert memory_limit_bytes(proc, tmp_path) == 10**8
    assert memory_limit_bytes(tmp_path / "absent", tmp_path) == unlimited


def test_the_simulated_disk_serves_one_read_after_another(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(200)))
    now, waits = [10.0], []
    preadv = slow_disk.SlowDisk(100.0, lambda: now[0], waits.append).slowed(os.preadv, int)
    buffer = bytearray(50)
    with path.open("rb") as file:
        assert preadv(file.fileno(), [buffer], 100) == 50  # half a second on an idle device
        assert preadv(file.fileno(), [buffer], 0) == 50  # behind it
        now[0] += 5
        assert preadv(file.fileno(), [buffer], 190) == 10  # idle again; the file ends
    assert waits == pytest.approx([0.5, 1.0, 0.1])
    assert buffer[:10] == bytes(range(190, 200))


@linux
@pytest.mark.skipif(not os.access("/sys/fs/cgroup", os.W_OK) or os.geteuid() != 0, reason="needs root")
def test_a_control_group_limits_its_command_and_goes(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks/in_cgroup.py"
    code = "x = bytearray(400 << 20); print(len(x))"
    for gib, ends_well in (("1", True), ("0.1", False)):
        command = [sys.executable, str(script), "--memory-gib", gib, "--", sys.executable, "-c", code]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            errors = process.communicate(timeout=60)[1]
        if "PermissionError" in errors or "OSError" in errors:
            pytest.skip("no memory controller here")
        assert (process.returncode == 0) == ends_well, errors
        assert not list(Path("/sys/fs/cgroup").glob(f"**/edge0-{process.pid}"))
