"""Every way to read experts computes the same: budget, threads, reading ahead and waiting never touch a logit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edge0_runtime.arms import ARMS
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.engine import Engine
from edge0_runtime.experts import memory
from edge0_runtime.experts.memory import ExpertMemory
from edge0_runtime.step import Step

ALL = 32  # experts of the tiny model
Outputs = list[list[tuple[int, bytes, bytes]]]


def outputs(engine: Engine, prompts: list[list[int]], tokens: int = 10) -> Outputs:
    """Ids, experts and logits, to the bit."""
    return [
        [
            (step.token, step.experts.tobytes(), step.logits.tobytes())
            for step in engine.generate(prompt, max_tokens=tokens, ignore_eos=True, trace=True)
        ]
        for prompt in prompts
    ]


def record_inputs(model: Any) -> dict[int, mx.array]:
    """Layer -> input [1, T, H] of its MoE block in mlx-lm's `model`, filled when that is called."""
    inputs: dict[int, mx.array] = {}

    class Recorded(type(model.layers[0].mlp)):  # type: ignore[misc]
        def __call__(self, x: mx.array) -> mx.array:
            inputs[self.number] = x
            return super().__call__(x)

    for number, layer in enumerate(model.layers):
        layer.mlp.__class__ = Recorded
        layer.mlp.number = number
    return inputs


@pytest.fixture(scope="module")
def long_prompts() -> list[list[int]]:
    """The second is read by whole layers: 60 tokens x 2 experts for 8 experts."""
    rng = np.random.default_rng(7)
    return [rng.integers(3, 384, size=n).tolist() for n in (3, 60)]


@pytest.mark.parametrize("arm", ARMS)
def test_any_budget_and_any_number_of_threads_give_the_same_bits(
    tiny_dir: Path, budget: Callable[..., float], long_prompts: list[list[int]], arm: str
) -> None:
    expected = None
    for slots, threads in ((ALL, 4), (1, 8), (2, 1), (3, 2), (5, 8), (9, 3), (17, 1), (31, 5)):
        options: dict[str, Any] = {"arm": arm, "io_threads": threads}
        if arm != "resident":
            options["memory_budget"] = budget(tiny_dir, slots, arm=arm)
        with Engine.load(tiny_dir, **options) as engine:
            got = outputs(engine, long_prompts)
            stats = engine.stats()
        assert stats["dropped_experts"] == 0
        if arm != "resident":
            assert stats["expert_slots"] == slots
            assert (stats["expert_loads"] > 0) == (slots < ALL)
        expected = expected or got
        assert got == expected
        if arm == "resident":
            break


def test_arms_on_own_gates_are_the_same_model_and_the_others_are_not(
    tiny_dir: Path, budget: Callable[..., float], long_prompts: list[list[int]]
) -> None:
    results = {}
    for arm in ARMS:
        options = {} if arm == "resident" else {"memory_budget": budget(tiny_dir, 12, arm=arm)}
        with Engine.load(tiny_dir, arm=arm, **options) as engine:
            results[arm] = outputs(engine, long_prompts)
            assert (engine.stats()["predicted_steps"] > 0) == (arm in ("prerouter", "same_token"))
    assert results["on_demand"] == results["history"] == results["lookahead"] == results["resident"]
    assert results["prerouter"] != results["on_demand"] != results["same_token"] != results["prerouter"]


def test_same_token_routes_by_the_next_gate_on_this_layers_input(
    tiny_dir: Path, plain_model: Callable[[Path, int], Any], long_prompts: list[list[int]]
) -> None:
    """Against mlx-lm's whole blocks, called layer by layer on the last token with the next gate's logits."""
    prompt = long_prompts[0]
    with Engine.load(tiny_dir, arm="same_token", lora=False) as engine:
        steps = list(engine.generate(prompt, max_tokens=2, ignore_eos=True, trace=True))
    model = plain_model(tiny_dir, 2)
    inputs = record_inputs(model)
    gates = [layer.mlp.gate for layer in model.layers]

    class FromBelow:
        def __init__(self, layer: int) -> None:
            self.layer = layer

        def __call__(self, x: mx.array) -> mx.array:
            own = gates[self.layer](x)
            if self.layer not in (1, 2):  # the tier's consumers
                return own
            below = gates[self.layer](inputs[self.layer - 1])
            return mx.concatenate([own[:, :-1], below[:, -1:]], axis=1)  # only the decoded token

    for number, layer in enumerate(model.layers):
        layer.mlp.gate = FromBelow(number)
    logits = np.array(model(mx.array([[*prompt, steps[0].token]]))[0, -1])
    assert np.linalg.norm(steps[1].logits - logits) < 1e-4 * np.linalg.norm(logits)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[list[int]]]]:
    """(layers, experts of each in rising order) of everything that is asked for ahead."""
    calls: list[tuple[list[int], list[list[int]]]] = []
    want = ExpertMemory.want

    def spy(held: ExpertMemory, layers: list[int], experts_LK: np.ndarray, **options: bool) -> None:
        calls.append((list(layers), np.sort(experts_LK).tolist()))
        want(held, layers, experts_LK, **options)

    monkeypatch.setattr(ExpertMemory, "want", spy)
    return calls


@pytest.mark.parametrize("arm", ["prerouter", "lookahead", "on_demand"])
def test_a_layer_on_its_own_gate_has_read_what_the_next_ones_gate_chooses_from_its_input(
    make_dir: Callable[..., Path],
    plain_model: Callable[[Path, int], Any],
    budget: Callable[..., float],
    long_prompts: list[list[int]],
    asked: list[Any],
    arm: str,
) -> None:
    """Against mlx-lm's blocks; only the last consumer is predicted, so layers 0 and 1 keep their gates."""
    directory = make_dir(owners=(1,), consumers=(2,))
    prompt = long_prompts[0][:1]  # one token: a pass by own gates in every arm
    with Engine.load(directory, arm=arm, lora=False, memory_budget=budget(directory, 20, arm=arm)) as engine:
        list(engine.generate(prompt, max_tokens=1, trace=True))
    model = plain_model(directory, 2)
    inputs = record_inputs(model)
    mx.eval(model(mx.array([prompt])))
    expected = []
    for below, layer in enumerate(model.layers[1:]):
        logits = np.array(layer.mlp.gate(inputs[below])[0, -1])
        expected.append(([below + 1], [sorted(np.argsort(logits)[-2:].tolist())]))
    assert asked == ([] if arm == "on_demand" else expected)


def test_a_head_that_routes_nothing_says_what_to_read(
    tiny_dir: Path,
    budget: Callable[..., float],
    prompts: list[list[int]],
    asked: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layer 3 keeps its gate and owner 2 has a head: its experts are asked for with those of layers 1 and 2."""
    monkeypatch.setattr(memory, "LEAST_ACCURACY", 0.0)
    with Engine.load(tiny_dir, memory_budget=budget(tiny_dir, 20)) as engine:
        for step in engine.generate(prompts[2], max_tokens=5, ignore_eos=True, trace=True):
            asked.clear()
            if not 2 <= step.index < 4:  # nothing is predicted for the first step, nor behind the last
                continue
            guess = np.sort(np.argsort(np.array(engine.sequence.coming.ahead.logits_TE))[:, -2:])
            engine.sequence.flush()
            assert asked == [([1, 2], guess[:2].tolist()), ([3], guess[2:].tolist())]


def test_without_prerouter_is_on_demand(tiny_dir: Path, long_prompts: list[list[int]]) -> None:
    with Engine.load(tiny_dir, prerouter=False) as engine, Engine.load(tiny_dir, arm="on_demand") as same:
        one, other = ((e.model.arm_name, e.model.fixed, e.model.plan) for e in (engine, same))
        assert one == other
        assert outputs(engine, long_prompts) == outputs(same, long_prompts)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"arm": "faster"}, "arm: 'faster' is unknown; choose one of prerouter"),
        ({"arm": "prerouter", "prerouter": False}, "--no-prerouter"),
        ({"io_threads": 0}, "io_threads: 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(tiny_dir: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(Edge0Error, match=says):
        Engine.load(tiny_dir, **options)


def test_the_budget_may_change_between_requests_and_only_there(
    tiny_dir: Path, budget: Callable[..., float], long_prompts: list[list[int]]
) -> None:
    with Engine.load(tiny_dir, memory_budget=budget(tiny_dir, 20)) as engine:
        expected = outputs(engine, long_prompts)
        for slots in (2, 32, 7, 1, 20):
            engine.set_memory_budget(budget(tiny_dir, slots))
            assert engine.stats()["expert_slots"] == slots
            assert outputs(engine, long_prompts) == expected
        steps = engine.generate(long_prompts[0], max_tokens=3, ignore_eos=True)
        next(steps)
        with pytest.raises(Edge0Error, match="a request is running"):
            engine.set_memory_budget(None)
        list(steps)
        with pytest.raises(Edge0Error, match="hold no expert"):
            engine.set_memory_budget(1e-9)
        assert outputs(engine, long_prompts) == expected
    with Engine.load(tiny_dir, arm="resident") as engine, pytest.raises(Edge0Error, match="resident"):
        engine.set_memory_budget(1.0)


def test_many_requests_in_one_process_equal_fresh_engines(
    tiny_dir: Path, budget: Callable[..., float], prompts: list[list[int]]
) -> None:
    options = {"memory_budget": budget(tiny_dir, 9)}
    fresh = []
    for prompt in prompts:
        with Engine.load(tiny_dir, **options) as engine:
            fresh += outputs(engine, [prompt])
    with Engine.load(tiny_dir, **options) as engine:
        for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 2, 2, 0)):
            steps = engine.generate(prompts[3], max_tokens=9, ignore_eos=True)  # given up halfway
            next(steps), next(steps)
            steps.close()  # type: ignore[attr-defined]
            assert outputs(engine, [prompts[i] for i in order]) == [fresh[i] for i in order]


def test_predicted_layers_are_staged_and_a_step_waits_for_its_own_gates_only(
    tiny_dir: Path, budget: Callable[..., float], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers 1 and 2 of 4 are predicted: their experts are asked for before the step, the others' in it."""
    with Engine.load(tiny_dir, memory_budget=budget(tiny_dir, 20)) as engine:
        acquired: list[tuple[int, int]] = []
        (pool,) = engine.model.memory.pools  # type: ignore[union-attr]
        acquire = pool.acquire

        def counting(layer: int, experts: np.ndarray, settle: Any, foreseen: bool) -> None:
            before = pool.late
            acquire(layer, experts, settle, foreseen=foreseen)
            acquired.append((layer, pool.late - before))

        monkeypatch.setattr(pool, "acquire", counting)
        for index, _ in enumerate(engine.generate(prompts[2], max_tokens=40, ignore_eos=True)):
            if index < 2:
                acquired.clear()  # prefill, and under "gate" the first decode step too
    assert {layer for layer, late in acquired if late} == {0, 3}
    assert {layer for layer, _ in acquired} == {0, 1, 2, 3}


def test_an_expert_that_was_not_staged_is_counted_and_refused(
    tiny_dir: Path, budget: Callable[..., float], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.load(tiny_dir, memory_budget=budget(tiny_dir, 20)) as engine:
        expected = outputs(engine, prompts[2:3])
        stage = Step.stage
        with monkeypatch.context() as patch:
            patch.setattr(Step, "stage", lambda step, layers, experts: stage(step, layers, (experts + 1) % 8))
            with pytest.raises(RuntimeError, match="routed experts were not staged"):
                list(engine.generate(prompts[2], max_tokens=10, ignore_eos=True))
        assert engine.stats()["dropped_experts"] > 0
        assert outputs(engine, prompts[2:3]) == expected


def test_close_to_a_dequantised_reference(
    tiny_dir: Path, plain_model: Callable[[Path, int], Any], budget: Callable[..., float]
) -> None:
    """down(silu(gate(x)) * up(x)) in float64 on the dequantised weights, below 1 %."""
    plain = plain_model(tiny_dir, 2).layers[1].mlp.switch_mlp
    with Engine.load(tiny_dir, memory_budget=budget(tiny_dir, 3)) as engine:
        streamed = engine.model.network.layers[1].mlp.switch_mlp
        x = mx.array(np.random.default_rng(3).standard_normal((1, 9, 64)).astype(np.float32))
        indices = mx.array(np.random.default_rng(4).integers(0, 8, size=(1, 9, 2)).astype(np.uint32))
        got_TKH = np.array(streamed(x, indices)[0], dtype=np.float64)

    def dense(projection: Any, expert: int) -> np.ndarray:
        parts = (projection[part][expert] for part in ("weight", "scales", "biases"))
        return np.array(mx.dequantize(*parts, group_size=64, bits=4), dtype=np.float64)

    x_TH, indices_TK = np.array(x[0], dtype=np.float64), np.array(indices[0])
    for t, k in np.ndindex(indices_TK.shape):
        gate, up, down = (dense(plain[name], int(indices_TK[t, k])) for name in ("gate_proj", "up_proj", "down_proj"))
        inner = gate @ x_TH[t]
        wanted = down @ (inner / (1 + np.exp(-inner)) * (up @ x_TH[t]))
        assert np.linalg.norm(got_TKH[t, k] - wanted) < 1e-2 * np.linalg.norm(wanted)
