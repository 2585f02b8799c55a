"""A sequence that goes on from a snapshot gives the very bits of one that was never interrupted."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from edge0_runtime.arms import ARMS
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.engine import Engine
from edge0_runtime.sequence import Sequence
from edge0_runtime.snapshot import Snapshot, arrays_of
from tests.mlx_memory import mlx_bytes
from tests.runtime.test_prerouter import RULES

Trace = list[tuple[bytes, bytes]]


def decode(sequence: Sequence, tokens: list[int]) -> Trace:
    """Logits and experts of every step, to the bit."""
    trace = []
    for token in tokens:
        logits = np.array(sequence.decode(token))
        assert sequence.last is not None
        trace.append((logits.tobytes(), sequence.last.executed().tobytes()))
    return trace


def after_prompt(engine: Engine, prompt: list[int], cut: int) -> Sequence:
    sequence = Sequence(engine.model)
    if prompt[:cut]:
        sequence.prefill(prompt[:cut], last=False)
    sequence.prefill(prompt[cut:], last=True)
    return sequence


TOKENS = [9, 80, 7, 9, 200, 31, 5, 6]


@pytest.mark.parametrize(("first_token", "feature_topk"), RULES)
@pytest.mark.parametrize("taken_after", [0, 1, 2, 5])
def test_going_on_from_a_snapshot_is_going_on(
    make_dir: Callable[..., Path],
    budget: Callable[..., float],
    prompts: list[list[int]],
    first_token: str,
    feature_topk: str,
    taken_after: int,
) -> None:
    """Taken in the prompt's end and between steps; used twice, after other sequences have run on the model."""
    directory = make_dir(first_token=first_token, feature_topk=feature_topk)
    with Engine.load(directory, memory_budget=budget(directory, 9)) as engine:
        for prompt, cut in ((prompts[0], 0), (prompts[3], 22)):
            expected = decode(after_prompt(engine, prompt, cut), TOKENS)
            sequence = after_prompt(engine, prompt, cut)
            decode(sequence, TOKENS[:taken_after])
            snapshot = sequence.snapshot()
            rest = expected[taken_after:]
            assert decode(sequence, TOKENS[taken_after:]) == rest  # taking it changed nothing
            decode(after_prompt(engine, prompts[2], 3), TOKENS[::-1])
            for _ in range(2):
                assert decode(Sequence(engine.model, snapshot), TOKENS[taken_after:]) == rest


@pytest.mark.parametrize("arm", ARMS)
def test_in_every_arm(tiny_dir: Path, prompts: list[list[int]], arm: str) -> None:
    with Engine.load(tiny_dir, arm=arm) as engine:
        expected = decode(after_prompt(engine, prompts[2], 3), TOKENS)
        sequence = after_prompt(engine, prompts[2], 3)
        decode(sequence, TOKENS[:3])
        assert decode(Sequence(engine.model, sequence.snapshot()), TOKENS[3:]) == expected[3:]


def test_past_the_cache_growing(tiny_dir: Path) -> None:
    """mlx-lm's KV cache grows in blocks of 256 positions and writes in place: neither may reach a snapshot."""
    tokens = [int(token) for token in np.random.default_rng(3).integers(3, 384, 260)]
    with Engine.load(tiny_dir) as engine:
        sequence = after_prompt(engine, tokens[:200], 100)
        snapshots: dict[int, Snapshot] = {}
        expected: Trace = []
        for index, token in enumerate(tokens[200:]):
            if index in (0, 55, 56, 57):  # positions 200, and around 256
                snapshots[index] = sequence.snapshot()
            expected += decode(sequence, [token])
        for index, snapshot in snapshots.items():
            assert decode(Sequence(engine.model, snapshot), tokens[200 + index :]) == expected[index:]
        assert snapshots[0].nbytes < snapshots[57].nbytes


def test_a_prompt_goes_on_from_a_snapshot_too(tiny_dir: Path, prompts: list[list[int]]) -> None:
    """As a prefix cache will: the shared beginning once, then one ending or the other."""
    with Engine.load(tiny_dir) as engine:
        expected = [decode(after_prompt(engine, prompts[3][:15] + end, 15), TOKENS) for end in ([5, 6, 7], [8])]
        sequence = Sequence(engine.model)
        sequence.prefill(prompts[3][:15], last=False)
        snapshot = sequence.snapshot()
        for end, wanted in zip(([5, 6, 7], [8]), expected, strict=True):
            sequence = Sequence(engine.model, snapshot)
            sequence.prefill(end, last=True)
            assert decode(sequence, TOKENS) == wanted


def test_a_snapshot_needs_a_pass(tiny_dir: Path) -> None:
    with Engine.load(tiny_dir) as engine, pytest.raises(RuntimeError, match="prefill"):
        Sequence(engine.model).snapshot()


def test_a_snapshot_is_evaluated(tiny_dir: Path, prompts: list[list[int]]) -> None:
    """Nothing of it may keep a graph, and with it slots, alive."""
    with Engine.load(tiny_dir) as engine:
        sequence = after_prompt(engine, prompts[3], 10)
        decode(sequence, TOKENS[:2])
        before = mlx_bytes()
        snapshot = sequence.snapshot()
        mx.eval(arrays_of([snapshot.rows.parts, snapshot.states, snapshot.features]))
        assert mx.get_active_memory() - before <= snapshot.nbytes + 2**16


def test_what_was_foreseen_before_another_pass_is_not_run(tiny_dir: Path, prompts: list[list[int]]) -> None:
    with Engine.load(tiny_dir) as engine:
        sequence = after_prompt(engine, prompts[2], 3)
        expected = decode(sequence, [5, 9])
        sequence = after_prompt(engine, prompts[2], 3)
        sequence.decode(5)
        sequence.foresee(mx.array(9))
        snapshot = sequence.snapshot()
        sequence.prefill([7, 8], last=True)  # a second turn
        assert sequence.coming is None
        assert decode(Sequence(engine.model, snapshot), [9]) == expected[1:]


def test_a_request_gives_all_its_memory_back(
    tiny_dir: Path, budget: Callable[..., float], prompts: list[list[int]]
) -> None:
    """Nothing stays in MLX's cache, and a closed engine that is forgotten leaves no cycle to be collected."""
    mx.clear_cache()
    before = mlx_bytes()
    engine = Engine.load(tiny_dir, memory_budget=budget(tiny_dir, 9))
    gc.disable()
    try:
        list(engine.generate(prompts[3], max_tokens=5, ignore_eos=True))
        assert mx.get_cache_memory() < 2**15
        engine.close()
        del engine
        assert mx.get_active_memory() - before < 2**12
    finally:
        gc.enable()


def test_an_exception_that_somebody_keeps_holds_no_slots(
    tiny_dir: Path, budget: Callable[..., float], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.load(tiny_dir, memory_budget=budget(tiny_dir, 20)) as engine:
        slots = weakref.ref(engine.model.memory)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", lambda *_: 0)
            with pytest.raises(Edge0Error) as kept:
                list(engine.generate(prompts[3], max_tokens=5, ignore_eos=True))
        engine.set_memory_budget(budget(tiny_dir, 9))
        assert kept.value is not None
        assert slots() is None
