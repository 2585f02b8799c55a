"""Doctor asks the real planner about models that are there, that are only a name, and that lie on the Hub."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge0_runtime.cli import main
from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import Sticky, builtin_tier
from edge0_runtime.engine import Engine
from edge0_runtime.measure import doctor as module
from edge0_runtime.measure.advice import gib_at_least
from edge0_runtime.measure.compute import step_seconds
from edge0_runtime.measure.doctor import doctor
from edge0_runtime.measure.doctor_text import doctor_text
from edge0_runtime.measure.forecast import Band, Forecast, smallest_budget
from edge0_runtime.measure.locality import locality
from edge0_runtime.measure.outline import outline_of_tier, write_outline
from edge0_runtime.plan import Plan
from tests.runtime.conftest import TIER

GIB = 2**30
DISK_BOUND = str(Path(__file__).parents[2] / "benchmarks" / "disk_bound.yaml")


@pytest.fixture(autouse=True)
def computing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second a step, not measured."""
    monkeypatch.setattr(module, "step_seconds", lambda checkpoint, tier: 0.5)


# -- what is said is what the engine does ------------------------------------------------------------------------------


def test_the_budgets_of_a_directory_are_those_of_the_engine(tiny_dir: Path, budget: Callable[..., float]) -> None:
    gib = budget(tiny_dir, 11)
    data = doctor(str(tiny_dir), budget_bytes=int(gib * GIB), disk_bytes_per_second=1e4)
    with Engine.load(tiny_dir, memory_budget=gib) as engine:
        assert engine.model.plan is not None
        assert data["budget"]["experts_held"] == engine.model.plan.slots == 11
    assert json.loads(json.dumps(data)) == data
    assert (data["tier"], data["experts"], data["expert_bytes"], data["step_bytes"]) == ("tiny", 32, 13_824, 8 * 13_824)
    assert len(data["expert_ranges"]) == 9 and data["versions"]["mlx"]
    assert data["disk"] == []
    assert "32 experts of 13.5 KiB in 9 ranges" in doctor_text(data)
    assert [row["experts_held"] for row in data["budgets"]] == sorted({row["experts_held"] for row in data["budgets"]})
    assert data["budgets"][-1]["experts_held"] == 32
    command, _, larger = data["advice"][0]["command"].rpartition(" ")
    assert command == f"edge0_runtime serve {tiny_dir} --memory-budget"
    with Engine.load(tiny_dir, memory_budget=float(larger)) as engine:
        assert engine.model.plan is not None and engine.model.plan.full


def test_a_tier_by_name_is_what_its_directory_would_be(tmp_path: Path) -> None:
    """The directory of holes is opened as any other."""
    tier = builtin_tier("nano")
    write_outline(tmp_path, outline_of_tier(tier))
    assert (tmp_path / "model.safetensors").stat().st_blocks * 512 < 2**18
    asked: dict[str, Any] = {"memory_bytes": 4 * GIB, "disk_bytes_per_second": 2e7}
    by_name, by_directory = doctor("nano", **asked), doctor(str(tmp_path), **asked)
    assert by_directory["tier"] == "nano"  # found by its architecture: no adapter file names it
    assert by_name["base_bytes"] == 1_958_832
    assert by_name["budgets"] == by_directory["budgets"] and by_name["smallest_budget_bytes"] > 0


def test_the_smallest_budget_is_the_last_that_the_planner_takes(tiny_dir: Path) -> None:
    def plan_for(budget_bytes: int, memory_bytes: int) -> Plan:
        if budget_bytes < 1_234_567_890:
            raise Edge0Error("memory_budget: too little")
        return None  # type: ignore[return-value]

    assert smallest_budget(plan_for) == math.ceil(1_234_567_890 / 2**20) * 2**20
    smallest = doctor(str(tiny_dir), disk_bytes_per_second=1e6)["smallest_budget_bytes"]
    Engine.load(tiny_dir, memory_budget=smallest / GIB).close()
    assert gib_at_least(1_600_126_977, 4) == "1.491"  # 1.49023... GiB
    if smallest > 2**20:
        with pytest.raises(Edge0Error, match=r"memory_budget: .* hold no expert"):
            Engine.load(tiny_dir, memory_budget=(smallest - 2**20) / GIB)


def test_another_router_and_k_can_be_asked_about() -> None:
    asked: dict[str, Any] = {"memory_bytes": GIB, "disk_bytes_per_second": 1e7, "budget_bytes": GIB // 2}
    plain, sticky = doctor(DISK_BOUND, **asked), doctor(DISK_BOUND, sticky=Sticky(2.0, 2), **asked)
    assert plain["budget"]["hit_share"][1] < sticky["budget"]["hit_share"][1] < 1
    assert sticky["locality"] == {"tier": "nano", "k": 4, "sticky": {"bias": 2.0, "window": 2}}
    assert doctor(DISK_BOUND, k=2, **asked)["step_bytes"] * 2 == plain["step_bytes"]


# -- the numbers ---------------------------------------------------------------------------------------------------------


def a_plan(slots: int) -> Plan:
    return Plan(
        budget_bytes=10, resident_bytes=1, embedding_bytes=0, embedding_held=False, adapter_bytes=1, widened_bytes=0,
        context=50, context_bytes=1, token_bytes=3, prefill_chunk=1, prefill_width=1, workspace_bytes=1, expert_nbytes=100,
        slot_nbytes=120, slots=slots, experts=40, step_experts=8, predicted_experts=4,
    )  # fmt: skip


def test_a_token_takes_between_the_longer_of_reading_and_computing_and_their_sum() -> None:
    row = Forecast(a_plan(20), 0.1, 1000.0, Band(0.25, 0.5))
    assert row.loads == (6.0, 4.0) and row.nbytes == (600.0, 400.0) and row.disk_seconds == (0.6, 0.4)
    assert row.tokens_per_second == pytest.approx((1 / 0.7, 1 / 0.4)) and row.bound == "disk"
    row = Forecast(a_plan(20), 0.5, 1000.0, Band(0.25, 0.5))
    assert row.tokens_per_second == pytest.approx((1 / 1.1, 1 / 0.5)) and row.bound == "computing"
    unknown = Forecast(a_plan(20), 0.5, None, Band(0.25, 0.5))
    assert unknown.tokens_per_second is None and unknown.bound is None
    assert Forecast(a_plan(40), 0.5, None, Band(1.0, 1.0)).tokens_per_second == (2.0, 2.0)


def test_what_is_held_lies_between_chance_and_what_was_recorded() -> None:
    nano, record = builtin_tier("nano"), locality(builtin_tier("nano"))
    assert record.hit_share(8, nano) == pytest.approx((8 / 32, 1 - 2.42 / 4))
    assert record.hit_share(10, nano) == pytest.approx((10 / 32, 1 - (2.42 + 1.88) / 2 / 4))
    assert record.hit_share(3.9, nano) == (0.0, 0.0)
    assert record.hit_share(32, nano) == (1.0, 1.0)
    large = builtin_tier("35b")  # the same K of more experts: the same memory of sets, less by chance
    assert record.hit_share(8, large) == pytest.approx((8 / 256, 1 - 2.42 / 4))
    assert locality(builtin_tier("8b")).misses[8] == 5.38  # recorded at its K


# -- what is found wanting, and what is wrong -----------------------------------------------------------------------------


def test_too_little_memory_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "35b", "--memory", "1", "--disk-mib-s", "1000"]) == 1
    said = capsys.readouterr().out
    found = re.search(r"smallest budget that works is 1\.\d+ GiB \(--memory-budget (1\.\d+)\)", said)
    assert "it won't run" in said and found
    assert main(["doctor", "35b", "--memory", "16", "--disk-mib-s", "1000", "--memory-budget", found[1]]) == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothing here"], "nothing here: neither a directory, nor a tier"),
        (["some/model"], "some/model: no such directory or tier, and HF_HUB_OFFLINE forbids asking the Hub"),
        (["nano", "--memory-budget", "0.001"], "hold no expert"),
        (["nano", "--probe-dir", "/nowhere"], "/nowhere"),
        (["nano", "--k", "33"], "tier.k"),
        (["nano", "--tier", "35b"], "nano is a tier already, so --tier 35b has no meaning"),
    ],
)
def test_what_is_wrong_is_a_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error and "Traceback" not in error


def test_a_longer_context_leaves_room_for_fewer_experts() -> None:
    asked: dict[str, Any] = {"memory_bytes": GIB, "disk_bytes_per_second": 1e7, "budget_bytes": GIB // 2}
    short, long = (doctor(DISK_BOUND, context=tokens, **asked)["budget"] for tokens in (256, 16_384))
    assert (short["context"], long["context"]) == (256, 16_384)
    assert short["experts_held"] > long["experts_held"]


def test_a_base_of_no_known_tier_asks_for_one(base_dir: Path) -> None:
    with pytest.raises(Edge0Error, match=r"no adapter file there names a tier.*--tier FILE\.yaml"):
        doctor(str(base_dir), disk_bytes_per_second=1e6)


def test_advice_keeps_what_was_asked(tiny_dir: Path, budget: Callable[..., float]) -> None:
    path, gib = str(tiny_dir), round(budget(tiny_dir, 11), 6)

    def commands(**supposed: Any) -> dict[str, str]:
        asked: dict[str, Any] = {"tier_name": "tiny", "context": 4000, "disk_bytes_per_second": 2**10}
        data = doctor(path, budget_bytes=int(gib * GIB), **asked, **supposed)
        return {one["change"]: one["command"] for one in data["advice"]}

    served = commands()["a larger budget"]
    assert served.startswith(f"edge0_runtime serve {path} --tier tiny --context 4000 --memory-budget ")
    given = f"--tier tiny --memory-budget {gib:.6g} --context 4000 --disk-mib-s 0.000976562"
    smaller = commands()["K 1, trained for"]
    assert smaller == f"edge0_runtime doctor {path} {given} --k 1" and main(shlex.split(smaller)[1:]) == 0
    assert commands(memory_bytes=GIB)["a larger budget"].startswith(
        f"edge0_runtime doctor {path} --tier tiny --memory 1 "
    )


def test_the_command_that_trains_has_all_that_was_asked_about() -> None:
    asked: dict[str, Any] = {"memory_bytes": 16 * GIB, "disk_bytes_per_second": 1e6}
    trains = "python -m edge0_train phase=all tier=35b"
    sticky = "tier.router.sticky.bias=2 tier.router.sticky.window=2"
    of_k8 = [one["command"] for one in doctor("35b", k=8, **asked)["advice"]]
    assert f"{trains} tier.k=8 {sticky}" in of_k8 and trains in of_k8  # K 4 is the tier's own
    of_sticky = [one["command"] for one in doctor("35b", sticky=Sticky(2.0, 2), **asked)["advice"]]
    assert f"{trains} tier.k=2 {sticky}" in of_sticky


@pytest.mark.parametrize("budget_gib", [1.6, 4.0])
def test_the_longest_context_is_the_planners(budget_gib: float) -> None:
    """At 8b its activations grow faster than what it keeps; 1.6 GiB hold less than a token's experts beside any."""
    asked: dict[str, Any] = {
        "budget_bytes": int(budget_gib * GIB),
        "memory_bytes": 16 * GIB,
        "disk_bytes_per_second": 1e9,
    }
    for tier in ("35b", "8b"):
        found = doctor(tier, **asked)
        longest, needed = found["budget"]["most_context"], found["budget"]["step_experts"]
        if not longest:
            assert doctor(tier, context=1, **asked)["budget"]["experts_held"] < needed
            assert f"the {needed} experts that a token needs don't fit beside any" in doctor_text(found)
            continue
        at = doctor(tier, context=longest, **asked)["budget"]
        assert at["context"] == longest and at["experts_held"] >= needed
        with contextlib.suppress(Edge0Error):
            longer = doctor(tier, context=longest + 256, **asked)["budget"]
            assert longer["experts_held"] < needed or longer["context"] == longest  # the model takes no longer one


def test_a_busy_machine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for load, busy in ((0.1, False), (1e3, True)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert ("the machine is busy" in doctor_text(doctor("nano", disk_bytes_per_second=1e9))) == busy


# -- what is measured here -----------------------------------------------------------------------------------------------


def test_the_disk_is_measured_on_a_file_that_goes_again(tmp_path: Path) -> None:
    data = doctor("nano", probe_dir=tmp_path, read_bytes=100_000, memory_bytes=GIB)
    assert [speed["experts"] for speed in data["disk"]] in ([14] * 4, [])
    assert not list(tmp_path.iterdir())
    assert (data["disk_bytes_per_second"] is None) == (not data["disk"])


def test_computing_is_measured_by_the_engines_own_path(tiny_dir: Path) -> None:
    assert 0 < step_seconds(Checkpoint.open(tiny_dir), TIER) < 60
