"""Heads run inside the step, and the next one's experts are read from then on: the same bits as after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from edge0_runtime.arms import prerouter
from edge0_runtime.arms.prerouter import Prerouter
from edge0_runtime.contract.tier import Router, Sticky
from edge0_runtime.engine import Engine
from edge0_runtime.experts import memory
from edge0_runtime.experts.memory import ExpertMemory
from edge0_runtime.sequence import Sequence
from edge0_runtime.step import Step
from tests.runtime.conftest import TIER
from tests.runtime.test_prerouter import RULES
from tests.runtime.test_sequence import TOKENS, Trace, after_prompt, decode

SLOTS = 20  # of 32 experts; a step needs 8
STICKY = Router(kind="softmax_topk", sticky=Sticky(bias=2.0, window=2))
Asked = list[tuple[list[int], list[list[int]]]]


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """(layers, their experts in rising order) of all that is asked for while a step runs, for the one after it."""
    asked: Asked = []
    want = ExpertMemory.want

    def spy(held: ExpertMemory, layers: list[int], experts_LK: np.ndarray, **options: bool) -> None:
        if options.get("early"):
            asked.append((list(layers), np.sort(experts_LK).tolist()))
        want(held, layers, experts_LK, **options)

    monkeypatch.setattr(ExpertMemory, "want", spy)
    return asked


@pytest.mark.parametrize("group", [1, 2, 4])
def test_the_next_steps_experts_are_asked_for_before_the_flush(
    tiny_dir: Path,
    budget: Callable[..., float],
    prompts: list[list[int]],
    early: Asked,
    monkeypatch: pytest.MonkeyPatch,
    group: int,
) -> None:
    """Owners 0 to 2 have heads: what layers 1 to 3 use next is known when they have got their experts of this step."""
    monkeypatch.setattr(prerouter, "GROUP", group)
    monkeypatch.setattr(memory, "LEAST_ACCURACY", 0.0)
    with Engine.load(tiny_dir, memory_budget=budget(tiny_dir, SLOTS)) as engine:
        sequence = after_prompt(engine, prompts[2], 3)
        assert early == []  # the first step isn't predicted
        for token in TOKENS:
            early.clear()
            sequence.decode(token)  # flush, and then its pass; no token is known that could come next
            before_the_flush = list(early)
            step = sequence.foresee(mx.array(7))
            sequence.flush()
            assert early == before_the_flush and step.ahead is not None
            experts_LK = np.sort(np.array(step.ahead.experts_TK)).tolist()
            assert before_the_flush == [([layer], [experts_LK[layer - 1]]) for layer in (1, 2, 3)]


def test_what_predicted_layers_need_next_is_asked_for_however_wrong_guesses_for_them_were(
    tiny_dir: Path,
    budget: Callable[..., float],
    prompts: list[list[int]],
    early: Asked,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their own gates were guessed in the first step, which isn't predicted, and in other arms."""
    monkeypatch.setattr(memory, "LEAST_ACCURACY", 2.0)
    with Engine.load(tiny_dir, memory_budget=budget(tiny_dir, SLOTS)) as engine:
        decode(after_prompt(engine, prompts[2], 3), TOKENS[:2])
        assert [layers for layers, _ in early] == [[1], [2]]  # in the second step; not of layer 3, which chooses itself


@pytest.mark.parametrize(("max_tokens", "read_for"), [(1, set()), (4, {-1, 0, 1})])
def test_nothing_is_read_for_a_step_that_will_not_come(
    make_dir: Callable[..., Path],
    budget: Callable[..., float],
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    max_tokens: int,
    read_for: set[int],
) -> None:
    """Neither inside the last step nor behind it: what is asked for while step N runs or when it has is for step N + 1."""
    directory, want = make_dir(first_token="predicted"), ExpertMemory.want
    with Engine.load(directory, memory_budget=budget(directory, SLOTS)) as engine:
        running: set[int] = set()

        def spy(held: ExpertMemory, layers: list[int], experts_LK: np.ndarray, **options: bool) -> None:
            if not options.get("soon"):
                running.add(engine.model.running.step.index)
            want(held, layers, experts_LK, **options)

        monkeypatch.setattr(ExpertMemory, "want", spy)
        list(engine.generate(prompts[2], max_tokens=max_tokens, ignore_eos=True))
        assert running == read_for


def test_heads_that_see_the_token_wait_for_it(
    make_dir: Callable[..., Path], budget: Callable[..., float], prompts: list[list[int]], early: Asked
) -> None:
    directory = make_dir(token_aware=True)
    with Engine.load(directory, memory_budget=budget(directory, SLOTS)) as engine:
        decode(after_prompt(engine, prompts[2], 3), TOKENS)
        assert engine.stats()["predicted_steps"] > 0 and early == []


@pytest.mark.parametrize("router", [TIER.router, STICKY], ids=["plain", "sticky"])
@pytest.mark.parametrize(("first_token", "feature_topk"), RULES)
@pytest.mark.parametrize("group", [1, 2])
def test_heads_say_inside_a_step_what_all_of_them_say_after_it(
    make_dir: Callable[..., Path],
    budget: Callable[..., float],
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    first_token: str,
    feature_topk: str,
    router: Router,
    group: int,
) -> None:
    """Bit for bit against the plain definition: all heads at once, on what the finished step left."""
    monkeypatch.setattr(prerouter, "GROUP", group)
    directory = make_dir(first_token=first_token, feature_topk=feature_topk, router=router)

    def logits(sequence: Sequence) -> Trace:
        trace: Trace = []
        for token in TOKENS:
            trace += decode(sequence, [token])
            assert sequence.last is not None
            ahead = sequence.foresee(mx.array(7)).ahead
            assert ahead is not None
            trace.append(tuple(np.array(array).tobytes() for array in ahead.arrays()))  # type: ignore[arg-type]
        return trace

    with Engine.load(directory, memory_budget=budget(directory, SLOTS)) as engine:
        inside = logits(after_prompt(engine, prompts[2], 3))
        with monkeypatch.context() as patch:
            patch.setattr(Prerouter, "look_ahead", lambda *_: None)
            assert logits(after_prompt(engine, prompts[2], 3)) == inside


def test_a_request_that_ends_early_leaves_nothing_reading(
    tiny_dir: Path, budget: Callable[..., float], prompts: list[list[int]], early: Asked
) -> None:
    with Engine.load(tiny_dir, memory_budget=budget(tiny_dir, SLOTS)) as engine:
        steps = engine.generate(prompts[2], max_tokens=9, ignore_eos=True)
        for _ in range(3):
            next(steps)
        assert early
        running = engine.sequence
        steps.close()  # type: ignore[attr-defined]
        (pool,) = engine.model.memory.pools  # type: ignore[union-attr]
        assert running is not None and running.last is None
        assert not pool._outstanding and not pool._early_wants
        assert not pool._early_S.any()


def test_slots_are_released_once_the_input_above_them_is_computed_and_the_rest_when_it_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layer by layer: submitted, and the one below waited for, so that something is always being computed."""
    events: list[tuple[str, int]] = []
    inputs = [mx.array(float(layer)) for layer in range(3)]

    class Memory:
        def release(self, below: int) -> None:
            events.append(("released below", below))

    def noting(what: str) -> Callable[[mx.array], None]:
        return lambda array: events.append((what, [x is array for x in inputs].index(True)))

    monkeypatch.setattr(mx, "async_eval", noting("submitted"))
    monkeypatch.setattr(mx, "eval", noting("computed"))
    step = Step(0, memory=Memory(), look_ahead=lambda *_: None)  # type: ignore[arg-type]
    for layer, x in enumerate(inputs):
        step.proceed(layer, x)
    first, second, third = (("submitted", layer) for layer in range(3))
    below = [[("computed", layer), ("released below", layer)] for layer in range(2)]
    assert events == [first, second, *below[0], third, *below[1]]
    step.stop()
    assert events[-1] == ("computed", 2) and step.memory is None
