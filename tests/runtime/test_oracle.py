"""The arm that knows what comes: perfect from the second run on, on_demand in the first, the same bits in both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edge0_runtime.arms import oracle
from edge0_runtime.engine import Engine
from edge0_runtime.measure.ab import compare
from edge0_runtime.step import Step

SLOTS = 14  # of 32 experts; a step needs 8


def test_nothing_is_late_in_the_second_run_and_the_bits_are_on_demands(
    tiny_dir: Path, budget: Callable[..., float], prompts: list[list[int]]
) -> None:
    runs = []
    with Engine.load(tiny_dir, arm="oracle", memory_budget=budget(tiny_dir, SLOTS, arm="oracle")) as engine:
        for _ in range(2):
            engine.forget_experts()
            late: list[int] = []
            outputs = []
            for token in engine.generate(prompts[2], max_tokens=12, ignore_eos=True, trace=True):
                late.append(engine.stats()["expert_late_misses"])
                outputs.append((token.token, token.experts.tobytes(), token.logits.tobytes()))
            runs.append((np.diff(late), outputs))
        assert engine.stats()["dropped_experts"] == 0
        with Engine.load(tiny_dir, arm="on_demand") as reference:
            expected = [
                (token.token, token.experts.tobytes(), token.logits.tobytes())
                for token in reference.generate(prompts[2], max_tokens=12, ignore_eos=True, trace=True)
            ]
    (first_late, first), (second_late, second) = runs
    assert first == second == expected
    assert first_late.sum() > 0 and second_late.sum() == 0


def test_another_continuation_is_not_taken_for_the_one_that_was_seen(
    tiny_dir: Path, prompts: list[list[int]], budget: Callable[..., float], monkeypatch: pytest.MonkeyPatch
) -> None:
    staged: list[int] = []
    stage = Step.stage
    monkeypatch.setattr(Step, "stage", lambda step, *args: (staged.append(step.index), stage(step, *args))[1])
    with Engine.load(tiny_dir, arm="oracle", memory_budget=budget(tiny_dir, SLOTS, arm="oracle")) as engine:
        list(engine.replay(prompts[2], [5, 6, 7, 8, 9]))
        assert staged == []
        list(engine.replay(prompts[2], [5, 6, 99, 8, 9]))
        assert staged == [0, 1]  # the steps that process 5 and 6; behind 99 everything is new
        staged.clear()
        list(engine.replay(prompts[3], [5, 6, 7, 8, 9]))
        assert staged == []


def test_memory_is_bounded(tiny_dir: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "MOST_STEPS", 4)
    with Engine.load(tiny_dir, arm="oracle") as engine:
        list(engine.replay(prompts[2], list(range(5, 20))))
        assert len(engine.model.arm._seen) == 4


def test_in_a_comparison_it_knows_from_its_first_measured_run_on(
    tiny_dir: Path, prompts: list[list[int]], budget: Callable[..., float]
) -> None:
    with Engine.load(tiny_dir, arm="oracle", memory_budget=budget(tiny_dir, SLOTS, arm="oracle")) as engine:
        arms = ("oracle", "on_demand")
        rows = list(compare(engine, prompts[2:3], arms=arms, max_tokens=8, rounds=1, page_cache="keep"))
    late = {arm: [row["decode_expert_late_per_step"] for row in rows if row["arm"] == arm] for arm in arms}
    assert late["oracle"] == [0, 0] and min(late["on_demand"]) > 0
