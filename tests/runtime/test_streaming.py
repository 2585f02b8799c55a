"""The exact path computes what the resident experts compute, bit for bit, at any cache size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.engine import Engine
from edge0_runtime.experts.memory import ExpertMemory
from edge0_runtime.experts.store import ExpertStore
from edge0_runtime.experts.streaming import StreamingSwitchGLU
from edge0_runtime.serving import find_adapters
from edge0_runtime.step import Running, Step

ONE_SLOT = 15_360  # bytes of the tiny checkpoint's experts in memory


@pytest.mark.parametrize("tokens", [1, 3, 40])  # 40 x 2 indices: SwitchGLU sorts from 64 on
@pytest.mark.parametrize("room", [1, 3, 8, 32])
def test_bit_equal_to_the_resident_switch_glu(
    tiny_dir: Path, plain_model: Callable[[Path, int], Any], tokens: int, room: int
) -> None:
    rng = np.random.default_rng(0)
    x = mx.array(rng.standard_normal((1, tokens, 64)).astype(np.float32))
    indices = mx.array(np.stack([rng.permutation(8)[:2] for _ in range(tokens)])[None].astype(np.uint32))
    tier = find_adapters(tiny_dir, prerouter=True, lora=False, tier_name=None).tier
    store = ExpertStore.open(Checkpoint.open(tiny_dir), tier)
    running = Running()
    expected = plain_model(tiny_dir, 2).layers[1].mlp.switch_mlp(x, indices)
    streaming = StreamingSwitchGLU(plain_model(tiny_dir, 2).layers[1].mlp.switch_mlp, 1, running)
    memory = ExpertMemory(store, threads=2, slots=room, spare=2, float32=True)
    streaming.attach(memory)
    for whole_layers in (False, True):
        running.step = step = Step(memory=memory, whole_layers=whole_layers)
        got = streaming(x, indices)
        assert got.shape == expected.shape == (1, tokens, 2, 64)
        assert mx.array_equal(got, expected).item()
        assert (np.array(step.ran[1]) == np.array(indices[0])).all()
        assert step.dropped() == {}
    memory.close()
    store.close()


def test_slots_reused_over_thousands_of_tokens_stay_right(
    tiny_dir: Path, plain_model: Callable[[Path, int], Any]
) -> None:
    """2,200 tokens through 6 slots, layers 1 and 2 staged as a prerouter does it, each against the resident module."""
    tier = find_adapters(tiny_dir, prerouter=True, lora=False, tier_name=None).tier
    store, running = ExpertStore.open(Checkpoint.open(tiny_dir), tier), Running()
    memory = ExpertMemory(store, threads=2, slots=6, spare=2, float32=True)
    resident = [layer.mlp.switch_mlp for layer in plain_model(tiny_dir, 2).layers]
    layers = plain_model(tiny_dir, 2).layers
    streaming = [StreamingSwitchGLU(layer.mlp.switch_mlp, n, running) for n, layer in enumerate(layers)]
    for module in streaming:
        module.attach(memory)
    rng = np.random.default_rng(2)
    x = mx.array(rng.standard_normal((1, 1, 64)).astype(np.float32))
    for _ in range(2200):
        routed = [mx.array(rng.permutation(8)[None, None, :2].astype(np.uint32)) for _ in range(4)]
        running.step = step = Step(memory=memory)
        step.stage([1, 2], np.concatenate([np.array(indices[0]) for indices in routed[1:3]]).astype(int))
        got = wanted = x
        for layer, indices in enumerate(routed):  # a residual stream: a layer's input is all that was computed below
            got = got + streaming[layer](got, indices).sum(axis=-2)
            wanted = wanted + resident[layer](wanted, indices).sum(axis=-2)
        assert mx.array_equal(got, wanted).item()
        assert step.dropped() == {}
        memory.release()
    assert memory.counters()["evictions"] > 10_000
    memory.close()
    store.close()


def test_without_adapters_and_at_the_bases_k_it_is_plain_mlx_lm(
    make_dir: Callable[..., Path],
    plain_model: Callable[[Path, int], Any],
    budget: Callable[..., float],
    prompts: list[list[int]],
) -> None:
    directory = make_dir(k=4)
    model = plain_model(directory, 4)
    flags = {"prerouter": False, "lora": False}
    with Engine.load(directory, **flags, memory_budget=budget(directory, 5, **flags)) as engine:
        for prompt in prompts:
            plain = [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=12)]
            steps = list(engine.generate(prompt, max_tokens=12, ignore_eos=True, trace=True))
            assert [step.token for step in steps] == plain
    assert all(step.experts is not None and step.experts.shape == (4, 4) for step in steps)


def test_logits_are_bit_equal_to_plain_mlx_lm(
    tiny_dir: Path, plain_model: Callable[[Path, int], Any], prompts: list[list[int]]
) -> None:
    model = plain_model(tiny_dir, 2)
    logits: list[np.ndarray] = []

    def keep(_: mx.array, row: mx.array) -> mx.array:
        logits.append(np.array(row[0]))
        return row

    list(generate_step(mx.array(prompts[3]), model, max_tokens=6, logits_processors=[keep]))
    with Engine.load(tiny_dir, prerouter=False, lora=False) as engine:
        steps = list(engine.generate(prompts[3], max_tokens=6, ignore_eos=True, trace=True))
    for step, expected in zip(steps, logits, strict=False):
        assert step.logits is not None and (step.logits == expected).all()


@pytest.mark.parametrize("adapters", [False, True])
def test_greedy_ids_do_not_depend_on_the_cache_size(
    tiny_dir: Path, budget: Callable[..., float], prompts: list[list[int]], adapters: bool
) -> None:
    outputs = []
    flags = {"prerouter": adapters, "lora": adapters}
    for room in (1, 2, 3, 8, 32):
        with Engine.load(tiny_dir, **flags, memory_budget=budget(tiny_dir, room, **flags)) as engine:
            outputs.append([[s.token for s in engine.generate(p, max_tokens=8, ignore_eos=True)] for p in prompts])
            stats = engine.stats()
            assert stats["dropped_experts"] == 0
            assert stats["expert_slots"] == room and stats["expert_slot_bytes"] == room * ONE_SLOT
            assert (stats["predicted_steps"] > 0) == adapters
    assert all(output == outputs[0] for output in outputs)


def test_the_checkpoints_experts_are_never_loaded_whole(tiny_dir: Path, budget: Callable[..., float]) -> None:
    with Engine.load(tiny_dir, memory_budget=budget(tiny_dir, 1)) as engine:
        values = [value for module in engine.model.network.modules() for value in module.values()]
        list(engine.generate([5, 6, 7], max_tokens=2))
        held = engine.stats()["experts_held"]
    shapes = [value.shape for value in values if isinstance(value, mx.array)]
    # only slots, and the short convolution's [C, k, 1]
    assert all(len(shape) < 3 or shape[-1] == 1 or shape[0] == 1 for shape in shapes)
    assert held == 1


def test_guesses_are_read_while_they_are_mostly_right(store: ExpertStore) -> None:
    """A wrong guess costs a read: after some of them only judging goes on, until they are right again."""
    memory = ExpertMemory(store, threads=2, slots=6, spare=2, float32=True)
    pool = memory.pool(1)

    def is_read(guess: list[int], chosen: list[int]) -> bool:
        pool.forget()
        memory.guess([1], np.array([guess]))
        asked = bool(pool.present(1, np.array(guess)).all())
        memory.judge(1, np.array(guess), np.array(chosen))
        return asked

    assert all(is_read([0, 1], [1, 0]) for _ in range(20))
    wrong = [is_read([0, 1], [2, 3]) for _ in range(20)]
    assert wrong == sorted(wrong, reverse=True) and wrong[0] and not wrong[-1]
    right = [is_read([0, 1], [0, 1]) for _ in range(20)]
    assert right == sorted(right) and right[-1]
    for _ in range(20):
        is_read([0, 1], [2, 3])
    memory.forget()
    assert is_read([0, 1], [2, 3])  # what was learnt is forgotten too
    memory.close()
