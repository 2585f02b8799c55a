"""Sticky prerouting in the runtime: what a bonus does to a routing, and that budget, arm and threads have no part in it.

What is chosen, set by set, is held by tests/parity/test_sticky_definition.py and test_student_parity.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edge0_runtime import sticky
from edge0_runtime.arms.prerouter import Prerouter
from edge0_runtime.contract.tier import Router, Sticky
from edge0_runtime.contract.traces import ReferenceTrace
from edge0_runtime.engine import Engine
from edge0_runtime.measure.verify import verify
from edge0_runtime.routing import choice_gap, predicted, row
from edge0_runtime.sequence import Sequence
from edge0_runtime.step import Step
from tests.runtime.test_arms import outputs
from tests.runtime.test_routing import SIGMOID, plain_sigmoid_group
from tests.runtime.test_sequence import TOKENS, after_prompt, decode
from tests.runtime.test_verify import record

SOFTMAX = Router("softmax_topk")
STICKY = Router("softmax_topk", sticky=Sticky(2.0, 2))
K = 4


def a_block(logits_TE: mx.array) -> tuple[np.ndarray, np.ndarray]:
    """Experts and weights as mlx-lm's softmax blocks take them from a gate's logits."""
    gates_TE = mx.softmax(logits_TE, axis=-1, precise=True)
    experts_TK = mx.argpartition(gates_TE, kth=-K, axis=-1)[..., -K:]
    weights_TK = mx.take_along_axis(gates_TE, experts_TK, axis=-1)
    return np.array(experts_TK), np.array(weights_TK / weights_TK.sum(axis=-1, keepdims=True))


def logits_and_bonus(experts: int, spread: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    bonus_TE = 2.0 * (random.random((50, experts)) < 0.2)
    return spread * random.standard_normal((50, experts)).astype(np.float32), bonus_TE.astype(np.float32)


def test_a_block_chooses_with_the_bonus_and_weighs_without() -> None:
    logits_TE, bonus_TE = logits_and_bonus(32)
    routing = predicted(SOFTMAX, mx.array(logits_TE), K, mx.array(bonus_TE))
    assert routing.logits_TE is not None
    changed = 0
    for t, (experts_K, weights_K) in enumerate(zip(*a_block(routing.logits_TE), strict=True)):
        wanted = {*np.argsort(-(logits_TE[t] + bonus_TE[t]))[:K].tolist()}
        assert {*experts_K.tolist()} == wanted == {*np.array(routing.experts_TK[t]).tolist()}
        mass_K = np.exp(logits_TE[t, experts_K].astype(np.float64))
        np.testing.assert_allclose(weights_K, mass_K / mass_K.sum(), rtol=1e-5)
        changed += wanted != {*np.argsort(-logits_TE[t])[:K].tolist()}
    assert changed > 10


def test_groups_and_experts_are_chosen_with_the_bonus_and_weighed_without() -> None:
    logits_TE, bonus_TE = logits_and_bonus(64)
    routing = predicted(SIGMOID, mx.array(logits_TE), K, mx.array(bonus_TE))
    changed = 0
    for t, (experts_K, weights_K) in enumerate(
        zip(*map(np.array, (routing.experts_TK, routing.weights_TK)), strict=True)
    ):
        none = np.zeros(64)
        wanted = plain_sigmoid_group(SIGMOID, (logits_TE[t] + bonus_TE[t]).astype(np.float64), K, none)
        assert {*experts_K.tolist()} == wanted.keys()
        score_K = 1 / (1 + np.exp(-logits_TE[t, experts_K].astype(np.float64)))
        np.testing.assert_allclose(weights_K, SIGMOID.scaling * score_K / score_K.sum(), rtol=1e-5)
        changed += wanted.keys() != plain_sigmoid_group(SIGMOID, logits_TE[t].astype(np.float64), K, none).keys()
    assert changed > 10


def test_a_chosen_expert_of_no_weight_is_still_the_one_that_the_block_takes() -> None:
    """Where float32's softmax gives 0 to it and to those that were not chosen."""
    logits_TE, bonus_TE = logits_and_bonus(32, spread=100.0)
    bonus_TE *= 1000
    routing = predicted(SOFTMAX, mx.array(logits_TE), K, mx.array(bonus_TE))
    assert routing.logits_TE is not None and routing.experts_TK is not None
    experts_TK, weights_TK = a_block(routing.logits_TE)
    assert np.array_equal(np.sort(experts_TK), np.sort(np.array(routing.experts_TK)))
    assert (weights_TK < 1e-30).any()


@pytest.mark.parametrize("router", [SOFTMAX, SIGMOID], ids=["softmax", "groups"])
def test_scores_are_what_was_chosen_by(router: Router) -> None:
    """So that `verify` sees a near-tie where the choice had one: with the bonus in it."""
    logits_TE, bonus_TE = logits_and_bonus(64)
    stacked = predicted(router, mx.array(logits_TE), K, mx.array(bonus_TE))
    for t, experts_K in enumerate(np.array(stacked.experts_TK).tolist()):
        chosen_by = row(router, stacked, t).scores
        assert chosen_by is not None
        assert choice_gap(router, np.array(chosen_by()), experts_K) <= 0


# -- served


@pytest.fixture(scope="module")
def long_prompts() -> list[list[int]]:
    """The second in a pass of whole layers; the first two are a token, and a token and one that goes alone."""
    random = np.random.default_rng(7)
    return [random.integers(3, 384, size=n).tolist() for n in (1, 2, 7, 60)]


@pytest.mark.parametrize("first_token", ["gate", "predicted"])
def test_any_budget_and_any_number_of_threads_give_the_same_bits(
    make_dir: Callable[..., Path], budget: Callable[..., float], long_prompts: list[list[int]], first_token: str
) -> None:
    directory = make_dir(router=STICKY, first_token=first_token)
    runs = []
    for slots, threads in ((32, 4), (1, 8), (3, 2), (9, 3), (31, 1)):
        with Engine.load(directory, memory_budget=budget(directory, slots), io_threads=threads) as engine:
            runs.append(outputs(engine, long_prompts))
            unlooked = [[t.token for t in engine.generate(p, max_tokens=10, ignore_eos=True)] for p in long_prompts]
            assert unlooked == [[token for token, _, _ in run] for run in runs[0]]  # with all held: built ahead
            assert engine.stats()["dropped_experts"] == 0
    assert all(run == runs[0] for run in runs)
    with Engine.load(make_dir(first_token=first_token)) as engine:
        assert outputs(engine, long_prompts) != runs[0]


def test_arms_on_own_gates_know_nothing_of_it(make_dir: Callable[..., Path], long_prompts: list[list[int]]) -> None:
    runs = []
    for router in (SOFTMAX, STICKY):
        for arm in ("on_demand", "lookahead", "resident"):
            with Engine.load(make_dir(router=router), arm=arm) as engine:
                runs.append(outputs(engine, long_prompts))
    assert all(run == runs[0] for run in runs)


@pytest.mark.parametrize("first_token", ["gate", "predicted"])
@pytest.mark.parametrize("slots", [9, 32])
@pytest.mark.parametrize("taken_after", [0, 1, 2, 5])
def test_a_snapshot_carries_what_ran(
    make_dir: Callable[..., Path],
    budget: Callable[..., float],
    prompts: list[list[int]],
    first_token: str,
    slots: int,
    taken_after: int,
) -> None:
    directory = make_dir(router=Router("softmax_topk", sticky=Sticky(6.0, 4)), first_token=first_token)
    with Engine.load(directory, memory_budget=budget(directory, slots)) as engine:
        for prompt, cut in ((prompts[0], 0), (prompts[3], 22)):
            expected = decode(after_prompt(engine, prompt, cut), TOKENS)
            sequence = after_prompt(engine, prompt, cut)
            decode(sequence, TOKENS[:taken_after])
            snapshot, rest = sequence.snapshot(), expected[taken_after:]
            assert decode(sequence, TOKENS[taken_after:]) == rest
            for _ in range(2):
                assert decode(Sequence(engine.model, snapshot), TOKENS[taken_after:]) == rest


# -- verify notices a runtime that goes by another rule


@pytest.fixture(scope="module")
def sticky_dir(make_dir: Callable[..., Path]) -> Path:
    return make_dir(router=STICKY, first_token="predicted")


@pytest.fixture(scope="module")
def trace(sticky_dir: Path) -> ReferenceTrace:
    random = np.random.default_rng(5)
    with Engine.load(sticky_dir) as engine:
        return record(engine, [random.integers(3, 384, size=n).tolist() for n in (2, 7, 23, 12)])


def other_rule(rule: Sticky) -> Callable[[pytest.MonkeyPatch, Engine], None]:
    def patch(_: pytest.MonkeyPatch, engine: Engine) -> None:
        arm: Any = engine.model.arm
        arm._tier = dataclasses.replace(arm._tier, router=dataclasses.replace(arm._tier.router, sticky=rule))

    return patch


def without_the_prompt(monkeypatch: pytest.MonkeyPatch, _: Engine) -> None:
    since = Prerouter._since

    def forgetful(arm: Prerouter, step: Step, rows: slice) -> mx.array:
        return since(arm, step, rows) if step.decoding else sticky.never(arm._tier)[rows]

    monkeypatch.setattr(Prerouter, "_since", forgetful)


def without_the_newest(monkeypatch: pytest.MonkeyPatch, _: Engine) -> None:
    bonus = sticky.bonus
    monkeypatch.setattr(
        sticky, "bonus", lambda rule, since_CE: bonus(rule, mx.where(since_CE == 1, rule.window + 1, since_CE))
    )


def test_verify_passes_what_goes_by_the_rule(sticky_dir: Path, trace: ReferenceTrace) -> None:
    with Engine.load(sticky_dir) as engine:
        report = verify(engine, trace)
    assert report.ok and all(prompt.judged_rows == 6 for prompt in report.prompts)


@pytest.mark.parametrize(
    "wrong",
    [
        other_rule(Sticky(1.0, 2)),
        other_rule(Sticky(2.0, 1)),
        other_rule(Sticky()),
        without_the_prompt,
        without_the_newest,
    ],
    ids=["bias", "window", "plain", "without the prompt", "without the newest input"],
)
def test_verify_finds_another_rule(
    sticky_dir: Path, trace: ReferenceTrace, monkeypatch: pytest.MonkeyPatch, wrong: Any
) -> None:
    with Engine.load(sticky_dir) as engine:
        wrong(monkeypatch, engine)
        report = verify(engine, trace)
    assert not report.ok and "probability gap" in report.problems()[0]
