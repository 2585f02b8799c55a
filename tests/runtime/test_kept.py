"""What a plan reserves for sequences: keys and values, quantised ones too, and snapshots of conversations."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edge0_runtime.activations import token_bytes
from edge0_runtime.cli import main
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import builtin_tier
from edge0_runtime.contract.traces import read_trace
from edge0_runtime.engine import Engine
from edge0_runtime.inspection import inspect
from edge0_runtime.measure.verify import verify
from edge0_runtime.plan import PREFIX_SHARE
from tests.own_trace import write_own_trace
from tests.runtime.conversations import REQUESTS, ROOM, load, steps
from tests.runtime.test_layered_prompts import directories

__all__ = ["directories"]


def logits(engine: Engine, prompt: list[int]) -> np.ndarray:
    (token,) = engine.generate(prompt, max_tokens=1, trace=True)
    assert token.logits is not None
    return token.logits


def test_fewer_bits_take_less_and_say_nearly_the_same(tiny_dir: Path) -> None:
    prompt = REQUESTS["go on"][0]
    found, kept = {}, {}
    for bits in (None, 8, 4):
        with Engine.load(tiny_dir, kv_bits=bits) as engine:
            found[bits] = logits(engine, prompt)
            plan = engine.model.plan
            assert plan is not None
            kept[bits] = plan.token_bytes
    away = {bits: np.linalg.norm(found[bits] - found[None]) / np.linalg.norm(found[None]) for bits in (8, 4)}
    assert 0 < away[8] < 0.01 < away[4] < 0.3
    numbers = 2 * 64  # of a token: keys and values of one head of one layer
    assert kept == {None: 4 * numbers, 8: numbers + 16, 4: numbers // 2 + 16}  # and a scale and a bias each


@pytest.mark.parametrize("slots", [None, 9])
def test_quantised_rows_are_shared_to_the_bit(tiny_dir: Path, budget: Callable[..., float], slots: int | None) -> None:
    room = {} if slots is None else {"memory_budget": budget(tiny_dir, slots) + ROOM}
    with load(tiny_dir, kv_bits=8) as engine:
        expected = [steps(engine, prompt)[0] for prompt, _ in REQUESTS.values()]
    with load(tiny_dir, kv_bits=8, prefix_cache=ROOM, **room) as engine:
        assert [steps(engine, prompt) for prompt, _ in REQUESTS.values()] == [
            (wanted, known) for wanted, (_, known) in zip(expected, REQUESTS.values(), strict=True)
        ]


def test_quantised_rows_are_found_on_the_disk_and_by_their_own_bits_only(tiny_dir: Path, tmp_path: Path) -> None:
    prompt = REQUESTS["begin"][0]
    known = []
    for bits in (8, 8, 4, None):
        with load(tiny_dir, kv_bits=bits, prefix_cache=ROOM, cache_dir=tmp_path) as engine:
            known.append(steps(engine, prompt)[1])
    assert known == [0, 70, 0, 0]


def test_latent_attention_has_no_quantised_cache(directories: dict[str, Path]) -> None:
    with pytest.raises(Edge0Error, match=r"kv_bits: mlx-lm has no attention .* leave --kv-bits out"):
        Engine.load(directories["bailing_moe_v3"], kv_bits=8)


def test_bits_that_nobody_has_are_named(tiny_dir: Path) -> None:
    with pytest.raises(Edge0Error, match="kv_bits: 5 must be one of 8, 4"):
        Engine.load(tiny_dir, kv_bits=5)


def test_verify_refuses_what_was_not_trained(tiny_dir: Path, tmp_path: Path) -> None:
    write_own_trace(tiny_dir, tmp_path / "trace.safetensors")
    with Engine.load(tiny_dir, kv_bits=8) as engine:
        trace = read_trace(tmp_path / "trace.safetensors", engine.model.tier)
        with pytest.raises(Edge0Error, match="verify: keys and values of 8 bits are not what was trained"):
            verify(engine, trace)


def test_the_command_line_says_it_all(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Commands that have conversations keep them; the others only take the bits."""
    asked = ["--prompt", "Add 299 and 289, then add 17 to that.", "--max-tokens", "4", "--temperature", "0", "--json"]
    kept = ["--prefix-cache", "0.01", "--cache-dir", str(tmp_path / "cache"), "--cache-dir-limit", "0.5"]
    answers = []
    for flags in ([], kept, kept, ["--prefix-cache", "0"]):
        assert main(["chat", str(tiny_dir), *asked, *flags]) == 0
        answers.append(json.loads(capsys.readouterr().out)["ids"])
    assert answers == answers[:1] * 4
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 1
    assert main(["generate", str(tiny_dir), "--prompt-ids", "5,6", "--max-tokens", "2", "--kv-bits", "4"]) == 0
    assert any("4 bits aren't what was trained" in record.getMessage() for record in caplog.records)
    assert main(["verify", str(tiny_dir), "--kv-bits", "8"]) != 0


# -- in the budget ---------------------------------------------------------------------------------------------------------


def test_snapshots_and_context_come_before_experts(tiny_dir: Path, budget: Callable[..., float]) -> None:
    """Each takes its bytes from the experts, and the plan names it."""
    memory = budget(tiny_dir, 20)
    with Engine.load(tiny_dir, memory_budget=memory) as engine:
        plan = engine.model.plan
        assert plan is not None and plan.prefix_bytes == 0
        assert "prefix cache" not in plan.text()
        slot = plan.slot_nbytes
    with Engine.load(tiny_dir, memory_budget=memory, prefix_cache=6 * slot / 2**30) as engine:
        smaller = engine.model.plan
        assert smaller is not None
        assert smaller.prefix_bytes == 6 * slot
        assert plan.slots - 7 <= smaller.slots <= plan.slots - 5
        assert "prefix cache" in smaller.text()
        assert smaller.fixed_bytes + smaller.slots * slot <= memory * 2**30


def test_an_eighth_of_the_budget_is_the_share(tiny_dir: Path, budget: Callable[..., float]) -> None:
    """All experts still fit where nobody says a budget; where little is there, an expert comes first."""
    with Engine.load(tiny_dir, prefix_cache=None) as engine:
        plan = engine.model.plan
        assert plan is not None and plan.full
        assert plan.prefix_bytes == math.floor(PREFIX_SHARE * plan.budget_bytes)
        assert engine.stats()["prefix_bytes"] == 0
    with Engine.load(tiny_dir, prefix_cache=None, memory_budget=budget(tiny_dir, 1)) as engine:
        plan = engine.model.plan
        assert plan is not None and plan.slots == 1
        assert plan.prefix_bytes < PREFIX_SHARE * plan.budget_bytes


def test_what_is_missing_is_named(tiny_dir: Path) -> None:
    with pytest.raises(Edge0Error) as refused:
        Engine.load(tiny_dir, memory_budget=0.02, prefix_cache=0.5)
    text = str(refused.value)
    assert (
        "a prefix cache of 0.5 GiB" in text
        and "too much; give at least" in text
        and "or a smaller prefix cache" in text
    )


def test_without_experts_to_stream_the_share_is_of_the_default_budget(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge0_runtime.model.memory_limit_bytes", lambda: 2**34)
    with Engine.load(tiny_dir, arm="resident", prefix_cache=None) as engine:
        assert engine.model.prefix_bytes == 2**34 // 32
    with Engine.load(tiny_dir, arm="resident") as engine:
        assert engine.model.prefix_bytes == 0


def test_inspect_says_what_context_costs_in_experts(tiny_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = inspect(tiny_dir)["base"]
    assert base["context_bytes_per_1000_tokens"] == 1000 * 2 * 2 * 64
    assert base["experts_per_1000_tokens"] == pytest.approx(256_000 / (base["expert_bytes"] / 32), rel=0.01)
    assert main(["inspect", str(tiny_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["base"]["experts_per_1000_tokens"] == base["experts_per_1000_tokens"]


def test_of_the_35b_a_thousand_tokens_cost_as_much_as_a_dozen_experts() -> None:
    tier = builtin_tier("35b")
    assert (
        token_bytes(tier, 1000, float32=False) == 1000 * 10 * 2 * 2 * 256 * 2
    )  # layers, keys and values, heads, width
    assert token_bytes(tier, 1000, float32=False, kv_bits=8) / token_bytes(tier, 1000, float32=False) == 0.53125
