"""`verify` tells near-ties that the rows' own routing doesn't show from faults: of what heads see, and in the prompt."""

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
from edge0_runtime.measure.verify import EXPORT_AGAIN, NEAR_TIE, report_text, verify
from edge0_runtime.step import Step
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
    prompts = tuple(dataclasses.replace(prompt, prompt_experts_PLK=None, own_TOK=None) for prompt in trace.prompts)
    return dataclasses.replace(trace, prompts=prompts)


def test_what_serves_as_trained_passes(engine: Engine, prompts: list[list[int]]) -> None:
    report = verify(engine, record(engine, prompts[:3]))
    assert report.ok and report.notes() == [] and not any(prompt.differences for prompt in report.prompts)


def test_a_near_tie_of_an_own_gate_ends_the_judgement_and_is_no_fault(engine: Engine, prompts: list[list[int]]) -> None:
    tie(engine, -1e-6)
    trace = record(engine, prompts[:3])
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
    old = without_own(record(engine, prompts[:3]))
    assert verify(engine, old).ok
    tie(engine, +1e-6)
    problems = verify(engine, old).problems()
    assert any("probability gap" in problem for problem in problems)
    assert (
        problems[-1].startswith("the trace holds neither the prompt's routing nor what the heads see")
        and EXPORT_AGAIN in problems[-1]
    )


def tie_in_prompt(engine: Engine, lead: float, prompt: list[int]) -> None:
    """Tie two experts of the first layer at the prompt's fourth position."""
    trail = 0
    for token in prompt[:4]:  # as `Step.trail` is made of passes of one token
        trail = hash((trail, token))
    tie(engine, lead, layer=0, when=lambda: engine.model.running.step.trail == trail)


def test_a_near_tie_in_the_prompt_is_no_fault_as_long_as_other_prompts_are_judged(
    engine: Engine, prompts: list[list[int]]
) -> None:
    engine.prefill_chunk = 1
    tie_in_prompt(engine, -1e-6, prompts[2])
    trace = record(engine, prompts[1:3])
    tie_in_prompt(engine, +1e-6, prompts[2])
    report = verify(engine, trace)
    assert report.ok, report.problems()
    first, tied = report.prompts[1].differences[0], report.prompts[1]
    assert (first.own, first.row, first.layer) == (False, -3, 0) and 0 < first.gap < 1e-6
    assert tied.logits_error_all > report.tolerance  # what came of it is no rounding
    assert [prompt.judged_rows for prompt in report.prompts] == [6, 0]
    alone = dataclasses.replace(trace, prompts=trace.prompts[1:])
    assert verify(engine, alone).problems() == [f"no row was judged; {EXPORT_AGAIN} and more export.trace_prompts"]


# -- faults


def shifted(heads: Heads, indices_OTK: mx.array, multi_hot: Callable = Heads.multi_hot) -> mx.array:
    return multi_hot(heads, (indices_OTK + 1) % 8)


def test_a_feature_of_other_experts_fails(
    engine: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = record(engine, prompts[:3])
    monkeypatch.setattr(Heads, "multi_hot", shifted)
    report = verify(engine, trace)
    assert not report.ok and "a head sees the own choice" in report.problems()[0]
    assert "probability gap" in report.problems()[0]


def test_features_of_the_wrong_position_fail(
    engine: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, remember = record(engine, prompts[:3]), Prerouter.remember

    def late(arm: Prerouter, step: Step) -> Features:
        features = remember(arm, step)
        assert features is not None
        return features._replace(routing=features.previous)

    monkeypatch.setattr(Prerouter, "remember", late)
    assert not verify(engine, trace).ok


def test_a_fault_behind_nothing_but_near_ties_fails(engine: Engine, prompts: list[list[int]]) -> None:
    """Own choices of another layer in the row of a near-tie are independent of it, and judged."""
    tie(engine, -1e-6)
    trace = record(engine, prompts[:3])
    tie(engine, +1e-6)
    last = trace.prompts[-1]
    assert last.own_TOK is not None
    own_TOK = last.own_TOK.copy()
    own_TOK[3, 2] = [e for e in range(8) if e not in own_TOK[3, 2]][:2]
    changed = (*trace.prompts[:-1], dataclasses.replace(last, own_TOK=own_TOK))
    (problem,) = verify(engine, dataclasses.replace(trace, prompts=changed)).problems()
    assert "row 3, MoE layer 2: a head sees the own choice" in problem


def test_other_experts_in_the_prompt_fail(engine: Engine, prompts: list[list[int]]) -> None:
    trace = record(engine, prompts[1:3])
    experts_PLK = trace.prompts[1].prompt_experts_PLK
    assert experts_PLK is not None
    row_K = experts_PLK[5, 3]
    row_K[:] = [e for e in range(8) if e not in row_K][:K]
    (problem,) = verify(engine, trace).problems()
    assert "prompt 1: row -1, MoE layer 3: routed to" in problem
