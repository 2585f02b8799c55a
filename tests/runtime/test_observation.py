"""What is counted of decode steps while somebody watches: it equals the trace, costs no bit, and nobody pays who doesn't look."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from edge0_runtime.engine import Engine, Token
from edge0_runtime.observation import PREDICTED, RAN, READ, RECENT_STEPS, Seen

TOKENS = 12
SLOTS = 7  # of 32 experts; a step needs 8


@pytest.fixture(params=["scarce", "full", "resident"])
def engine(request: pytest.FixtureRequest, tiny_dir: Path, budget: Callable[..., float]) -> Iterator[Engine]:
    """With experts that are read in every step, that are all in slots, and that lie in mlx-lm's own modules."""
    options = {"scarce": {"memory_budget": budget(tiny_dir, SLOTS)}, "full": {}, "resident": {"arm": "resident"}}
    with Engine.load(tiny_dir, **options[request.param]) as loaded:
        yield loaded


@pytest.fixture
def scarce(tiny_dir: Path, budget: Callable[..., float]) -> Iterator[Engine]:
    with Engine.load(tiny_dir, memory_budget=budget(tiny_dir, SLOTS)) as loaded:
        yield loaded


def watched(engine: Engine, prompt: list[int], **options: bool) -> tuple[list[Token], Seen]:
    with engine.observation.watch():
        tokens = list(engine.generate(prompt, max_tokens=TOKENS, ignore_eos=True, **options))
    return tokens, engine.observation.seen()


def histogram(engine: Engine, tokens: list[Token]) -> np.ndarray:
    """[L, E], from a trace: what the first token's input ran belongs to the prompt."""
    counts_LE = np.zeros((len(engine.observation.layers), engine.model.store.num_experts), np.int64)
    for token in tokens[1:]:
        assert token.experts is not None
        counts_LE[np.arange(len(counts_LE))[:, None], token.experts] += 1
    return counts_LE


def test_watching_changes_no_bit(engine: Engine, prompts: list[list[int]]) -> None:
    for options in ({}, {"trace": True}):
        alone = list(engine.generate(prompts[2], max_tokens=TOKENS, ignore_eos=True, **options))
        tokens, seen = watched(engine, prompts[2], **options)
        assert [(t.token, t.logprob) for t in tokens] == [(t.token, t.logprob) for t in alone]
        assert seen.steps > 0
    assert all(np.array_equal(a.logits, b.logits) for a, b in zip(alone, tokens, strict=True))


@pytest.mark.parametrize("trace", [True, False])  # without a trace, a step is built ahead where nothing is waited for
def test_what_ran_is_what_the_trace_says(engine: Engine, prompts: list[list[int]], trace: bool) -> None:
    traced = list(engine.generate(prompts[3], max_tokens=TOKENS, ignore_eos=True, trace=True))
    _, seen = watched(engine, prompts[3], trace=trace)
    assert np.array_equal(seen.counts_3LE[RAN], histogram(engine, traced))
    assert seen.steps == TOKENS - 1 == len(seen.recent)
    assert seen.seconds == pytest.approx(sum(step.seconds for step in seen.recent)) and seen.seconds > 0


@pytest.mark.parametrize("slots", [SLOTS, 32])
def test_a_prediction_is_the_routing_from_the_second_step_on(
    tiny_dir: Path, budget: Callable[..., float], prompts: list[list[int]], slots: int
) -> None:
    """The tier's first decode step keeps its gates; layers 1 and 2 are predicted then, 3 is guessed by the last head."""
    with Engine.load(tiny_dir, memory_budget=budget(tiny_dir, slots)) as engine:
        traced = list(engine.generate(prompts[2], max_tokens=TOKENS, ignore_eos=True, trace=True))
        _, seen = watched(engine, prompts[2])
        predicted_LE, later_LE = seen.counts_3LE[PREDICTED], histogram(engine, traced[1:])
        if slots == 32:  # nothing is guessed where nothing is read
            assert np.array_equal(predicted_LE[1:3], later_LE[1:3]) and seen.guessed == 0
            assert not predicted_LE[[0, 3]].any()
            return
        first_LE = histogram(engine, traced[:2])  # guessed in the first step, layer by layer, from the one below
        assert (predicted_LE[1:3] >= later_LE[1:3]).all()
        assert predicted_LE[1:3].sum() == later_LE[1:3].sum() + first_LE[1:3].sum()
        assert predicted_LE[3].any() and 0 <= seen.guessed_right <= seen.guessed
        assert seen.guessed == predicted_LE.sum() - later_LE[1:3].sum()


def test_reads_are_those_that_the_counters_count(scarce: Engine, prompts: list[list[int]]) -> None:
    _, seen = watched(scarce, prompts[2])
    after = scarce.stats()
    nbytes = scarce.model.store.expert_nbytes(0)
    assert 0 < seen.counts_3LE[READ].sum() == seen.totals["loads"] <= after["expert_loads"]
    assert seen.totals["bytes_read"] == seen.totals["loads"] * nbytes == sum(step.bytes_read for step in seen.recent)
    assert seen.totals["hits"] + seen.totals["misses"] == seen.counts_3LE[RAN].sum()
    assert 0 < seen.totals["blocked_seconds"] <= seen.seconds


def test_nothing_is_counted_or_noted_where_nobody_watches(scarce: Engine, prompts: list[list[int]]) -> None:
    _, seen = watched(scarce, prompts[2])
    list(scarce.generate(prompts[3], max_tokens=TOKENS, ignore_eos=True))
    later = scarce.observation.seen()
    assert later.steps == seen.steps and np.array_equal(later.counts_3LE, seen.counts_3LE)
    assert scarce.model.memory is not None
    assert scarce.observation.watchers == 0 and [pool.reads for pool in scarce.model.memory.pools] == [None]


def test_who_comes_or_leaves_midway_sees_the_steps_in_between(scarce: Engine, prompts: list[list[int]]) -> None:
    steps = scarce.generate(prompts[2], max_tokens=TOKENS, ignore_eos=True, trace=True)
    tokens = [next(steps) for _ in range(3)]
    with scarce.observation.watch():
        tokens += [next(steps) for _ in range(4)]  # the first of them is where counting begins
    tokens += list(steps)
    seen = scarce.observation.seen()
    assert seen.steps == 3
    assert np.array_equal(seen.counts_3LE[RAN], histogram(scarce, tokens[3:7]))
    assert seen.counts_3LE[READ].sum() == seen.totals["loads"]


def test_state_says_what_the_engine_does_also_after_a_failure(scarce: Engine, prompts: list[list[int]]) -> None:
    observation, cancel = scarce.observation, threading.Event()
    assert observation.state == "idle"
    with observation.watch():
        steps = scarce.generate(prompts[2], max_tokens=TOKENS, ignore_eos=True, cancel=cancel)
        next(steps)
        assert observation.state == "answer"
        next(steps)
        cancel.set()
        assert [token.finish_reason for token in steps] == ["cancelled"]
        assert observation.state == "idle" and observation.seen().steps == 1  # the cancelled step isn't evaluated
        steps = scarce.generate(prompts[2], max_tokens=TOKENS, ignore_eos=True)
        next(steps)
        steps.close()  # type: ignore[attr-defined]
        assert observation.state == "idle"
        cancelled = threading.Event()
        cancelled.set()
        assert [t.finish_reason for t in scarce.generate(prompts[3], max_tokens=2, cancel=cancelled)] == ["cancelled"]
        assert observation.state == "idle"
    assert scarce.model.memory is not None and [pool.reads for pool in scarce.model.memory.pools] == [None]


def test_any_thread_may_look_while_steps_are_counted(scarce: Engine, prompts: list[list[int]]) -> None:
    looks: list[Seen] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            looks.append(scarce.observation.seen())

    other = threading.Thread(target=look)
    with scarce.observation.watch():
        other.start()
        try:
            list(scarce.generate(prompts[2], max_tokens=16, ignore_eos=True))
        finally:
            done.set()
            other.join()
    per_step = scarce.observation.seen().counts_3LE[RAN].sum() // 15
    assert all(seen.counts_3LE[RAN].sum() == per_step * seen.steps for seen in looks)  # whole steps only
    assert len({seen.steps for seen in looks}) > 1


def test_the_last_steps_are_kept_and_no_more(tiny_dir: Path) -> None:
    with Engine.load(tiny_dir) as engine, engine.observation.watch():
        for _ in range(2):
            list(engine.generate([5], max_tokens=200, ignore_eos=True))
    seen = engine.observation.seen()
    assert seen.steps == 2 * 199 > RECENT_STEPS == len(seen.recent)
