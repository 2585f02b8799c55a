"""`verify` where heads see what their owners' own gates choose: a near-tie there is no fault, another feature is one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from edge0_runtime.arms.prerouter import Features, Prerouter
from edge0_runtime.contract.traces import ReferenceTrace
from edge0_runtime.engine import Engine
from edge0_runtime.heads import Heads
from edge0_runtime.measure.verify import NEAR_TIE, report_text, verify
from tests.runtime.test_verify import record

LAYER = 1  # owner, and predicted: its own gate only speaks to its head
K = 2


class Tied(nn.Module):
    """A gate for which the K-th and the next expert are all but equally likely, as far as `when` allows: the next has `lead`."""

    def __init__(self, inner: nn.Module, lead: float, when: Callable[[], bool]) -> None:
        super().__init__()
        self.inner, self._lead, self._when = inner, lead, when

    def __call__(self, x: mx.array) -> mx.array:
        logits: mx.array = self.inner(x)
        if self._when():
            following, last = np.argsort(np.array(logits).reshape(-1))[-K - 1 : -K + 1].tolist()
            logits[..., following] = logits[..., last] + self._lead
        return logits


@pytest.fixture
def engine(make_dir: Callable[..., Path]) -> Iterator[Engine]:
    with Engine.load(make_dir(first_token="predicted", feature_topk="teacher")) as loaded:
        yield loaded


def tie(engine: Engine, lead: float, layer: int = LAYER, when: Callable[[], bool] | None = None) -> None:
    """Tie two experts of a layer's own gate, by default in the third decode step, as libraries see it that round differently."""
    gate = engine.model.parts.gates[layer]
    inner = gate.inner.inner if isinstance(gate.inner, Tied) else gate.inner
    gate.inner = Tied(inner, lead, when or (lambda: engine.model.running.step.index == 2))


def without_own(trace: ReferenceTrace) -> ReferenceTrace:
    """As an export from before wrote it."""
    prompts = tuple(dataclasses.replace(prompt, own_SOK=None) for prompt in trace.prompts)
    return dataclasses.replace(trace, prompts=prompts)


def test_what_serves_as_trained_passes(engine: Engine, prompts: list[list[int]]) -> None:
    report = verify(engine, record(engine, prompts))
    assert report.ok and report.notes() == [] and not any(prompt.differences for prompt in report.prompts)


def test_a_near_tie_of_an_own_gate_ends_the_judgement_and_is_no_fault(engine: Engine, prompts: list[list[int]]) -> None:
    tie(engine, -1e-6)
    trace = record(engine, prompts)
    tie(engine, +1e-6)
    report = verify(engine, trace)
    assert report.ok, report.problems()
    gaps = []
    for prompt, note in zip(report.prompts, report.notes(), strict=True):
        first, *later = prompt.differences
        assert (first.own, first.row, first.layer) == (True, 3, LAYER) and 0 < first.gap < 1e-6
        assert prompt.judged_rows == 4 and prompt.logits_error < 1e-5  # its own row ran as in the reference
        assert note in report_text(report) and "judged up to row 4, since of a near-tie: row 3, MoE layer 1" in note
        gaps += [one.gap for one in later]
    assert max(gaps) > 100 * NEAR_TIE  # what came of it is another routing by any measure


def test_a_trace_without_own_choices_is_read_and_what_it_cannot_tell_is_said(
    engine: Engine, prompts: list[list[int]]
) -> None:
    tie(engine, -1e-6)
    old = without_own(record(engine, prompts))
    assert verify(engine, old).ok
    tie(engine, +1e-6)
    problems = verify(engine, old).problems()
    assert any("probability gap" in problem for problem in problems)
    assert (
        problems[-1].startswith("the trace doesn't hold what the owners' own gates chose")
        and "phase=export" in problems[-1]
    )


def test_a_near_tie_at_the_prompts_last_position_but_one_is_found_too(engine: Engine, prompts: list[list[int]]) -> None:
    """The first prediction's heads see it as the previous routing; by the prompt's own rows it isn't in the trace."""
    at = [len(prompts[2]) - 1]  # offset of the KV cache in that position's pass

    def there() -> bool:
        step, sequence = engine.model.running.step, engine.sequence
        return not step.decoding and sequence is not None and sequence._kv[-1].offset + 1 == at[0]

    def alone(prompt: list[int]) -> None:
        engine.prefill_chunk = len(prompt) - 2  # so that the position goes alone

    alone(prompts[2])
    tie(engine, -1e-6, layer=2, when=there)
    trace = record(engine, [prompts[2]])
    tie(engine, +1e-6, layer=2, when=there)
    report = verify(engine, trace)
    first = report.prompts[0].differences[0]
    assert (first.row, first.layer, first.own) == (-1, 2, True) and 0 < first.gap < 1e-6
    assert report.ok and report.prompts[0].judged_rows == 0


# -- faults


def shifted(heads: Heads, indices_OTK: mx.array, multi_hot: Callable = Heads.multi_hot) -> mx.array:
    return multi_hot(heads, (indices_OTK + 1) % 8)


def test_a_feature_of_other_experts_fails(
    engine: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = record(engine, prompts)
    monkeypatch.setattr(Heads, "multi_hot", shifted)
    report = verify(engine, trace)
    assert not report.ok and "a head sees the own choice" in report.problems()[0]
    assert "probability gap" in report.problems()[0]


def test_features_of_the_wrong_position_fail(
    engine: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, remember = record(engine, prompts), Prerouter.remember

    def late(arm: Prerouter, step: object, last: object) -> Features:
        features = remember(arm, step, last)  # type: ignore[arg-type]
        assert features is not None
        return features._replace(routing=features.previous)

    monkeypatch.setattr(Prerouter, "remember", late)
    assert not verify(engine, trace).ok


def test_a_fault_behind_nothing_but_near_ties_fails(engine: Engine, prompts: list[list[int]]) -> None:
    """Own choices of another layer in the row of a near-tie are independent of it, and judged."""
    tie(engine, -1e-6)
    trace = record(engine, prompts)
    tie(engine, +1e-6)
    last = trace.prompts[-1]
    assert last.own_SOK is not None
    own_SOK = last.own_SOK.copy()
    own_SOK[1 + 3, 2] = [e for e in range(8) if e not in own_SOK[1 + 3, 2]][:2]
    changed = (*trace.prompts[:-1], dataclasses.replace(last, own_SOK=own_SOK))
    (problem,) = verify(engine, dataclasses.replace(trace, prompts=changed)).problems()
    assert "row 3, MoE layer 2: a head sees the own choice" in problem
