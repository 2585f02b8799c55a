"""Long prompts, whose chunks go through a layer together: the same bits, each expert read once, what is held afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edge0_runtime.engine import Engine
from edge0_runtime.experts.memory import ExpertMemory, _worth
from edge0_runtime.sequence import Sequence
from edge0_runtime.step import Step
from edge0_train.base import quantize_checkpoint
from tests.random_adapters import write_adapters
from tests.tiny_ling import tiny_ling, tiny_ling_tier
from tests.twins import TWINS

CHUNK = 8
PROMPT = np.random.default_rng(7).integers(3, 384, size=45).tolist()  # 5 chunks, one of 4, the last token
LAYERS, EXPERTS, K = 4, 8, 2  # of the tiny model


@pytest.fixture(scope="module")
def directories(make_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model of each family, both of which leave features with the prompt."""
    ling = tmp_path_factory.mktemp("ling")
    tier = tiny_ling_tier(lora={"r": 4, "alpha": 8, "targets": list(TWINS["bailing_moe_v3"].targets)})
    quantize_checkpoint(tiny_ling(ling / "hf"), ling / "int4", tier)
    write_adapters(ling / "int4", tier)
    return {"qwen3_5_moe": make_dir(first_token="predicted"), "bailing_moe_v3": ling / "int4"}


def steps_of(engine: Engine, prompt: list[int], width: int) -> list[tuple[int, bytes, bytes]]:
    """Tokens, experts and logits of a request whose prompt goes in chunks of CHUNK, `width` tokens together."""
    engine.prefill_chunk, engine.prefill_width = CHUNK, width
    steps = list(engine.generate(prompt, max_tokens=6, ignore_eos=True, trace=True))
    assert all(step.experts is not None and step.logits is not None for step in steps)
    return [(step.token, step.experts.tobytes(), step.logits.tobytes()) for step in steps]


@pytest.mark.parametrize(
    ("family", "arm"), [(family, "prerouter") for family in TWINS] + [("qwen3_5_moe", "on_demand")]
)
def test_how_many_chunks_go_together_changes_no_bit(
    directories: dict[str, Path], budget: Callable[..., float], family: str, arm: str
) -> None:
    """Against one after the other with all experts in memory; a last chunk of one token too, and fewer slots than experts."""
    directory = directories[family]
    prompts = [PROMPT[: CHUNK * 4 + 2], PROMPT]
    with Engine.load(directory, arm=arm) as engine:
        expected = [steps_of(engine, prompt, CHUNK) for prompt in prompts]
    for slots in (5, 13):
        with Engine.load(directory, arm=arm, memory_budget=budget(directory, slots, arm=arm)) as engine:
            for width in (3 * CHUNK, 100):
                assert [steps_of(engine, prompt, width) for prompt in prompts] == expected
            assert engine.stats()["dropped_experts"] == 0


@pytest.mark.parametrize("slots", [EXPERTS + K, 12, 2 * EXPERTS + K])
def test_a_long_prompt_reads_a_layers_experts_once(tiny_dir: Path, budget: Callable[..., float], slots: int) -> None:
    on_demand = {"arm": "on_demand"}  # the last token goes alone, and nothing is guessed for it
    with Engine.load(tiny_dir, **on_demand, memory_budget=budget(tiny_dir, slots, **on_demand)) as engine:
        loads = {}
        for width in (CHUNK, 100):
            engine.forget_experts()
            before = engine.stats()["expert_loads"]
            engine.prefill_chunk, engine.prefill_width = CHUNK, width
            list(engine.generate(PROMPT, max_tokens=1))
            loads[width] = engine.stats()["expert_loads"] - before
    assert loads[CHUNK] > 4 * LAYERS * EXPERTS
    assert LAYERS * EXPERTS <= loads[100] <= LAYERS * (EXPERTS + K)  # and the last token's


def test_after_a_long_prompt_the_experts_that_it_used_most_are_held_of_every_layer(
    tiny_dir: Path, budget: Callable[..., float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the last token's. By the order of use alone, 20 slots would hold the last layers' and none of the first's."""
    ran: dict[int, np.ndarray] = {}
    rank = ExpertMemory.rank

    def noting(memory: ExpertMemory, layer: int, ran_TK: np.ndarray) -> None:
        ran[layer] = ran_TK
        rank(memory, layer, ran_TK)

    monkeypatch.setattr(ExpertMemory, "rank", noting)
    with Engine.load(tiny_dir, memory_budget=budget(tiny_dir, 20)) as engine:
        for repeated in range(2):  # what is there from an earlier request goes first
            first = next(engine.generate(PROMPT[:: -1 if repeated else 1], max_tokens=2, ignore_eos=True, trace=True))
            memory = engine.model.memory
            assert memory is not None and first.experts is not None
            for layer, last_K in enumerate(first.experts):
                assert ran[layer].shape == (len(PROMPT) - 1, K)
                most_used = np.argsort(-_worth(ran[layer], EXPERTS))[:2]
                wanted = np.concatenate([last_K, most_used])
                assert memory.pool(layer).present(layer, wanted).all(), layer


def test_a_use_counts_for_more_the_later_it_was() -> None:
    ran_TK = np.array([[0, 1], [0, 2], *[[3, 4]] * 40, [5, 6], [6, 4]])
    order = np.argsort(-_worth(ran_TK, EXPERTS), kind="stable").tolist()
    assert order == [4, 3, 6, 5, 0, 2, 1, 7]


@pytest.mark.parametrize("looks", [1, 3, 7])
def test_a_cancelled_prompt_stops_after_the_chunk_of_a_layer(
    tiny_dir: Path, budget: Callable[..., float], monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    calls, let_run, cancel = [], Sequence._let_run, threading.Event()

    def cancelling(sequence: Sequence, step: Step) -> None:
        calls.append(step)
        if len(calls) == looks:
            cancel.set()
        let_run(sequence, step)

    with Engine.load(tiny_dir, memory_budget=budget(tiny_dir, 12)) as engine:
        expected = steps_of(engine, PROMPT, 100)
        with monkeypatch.context() as patch:
            patch.setattr(Sequence, "_let_run", cancelling)
            (only,) = engine.generate(PROMPT, max_tokens=9, cancel=cancel)
        assert (only.finish_reason, only.index) == ("cancelled", 0)
        assert len(calls) == looks
        assert steps_of(engine, PROMPT, 100) == expected


def test_hidden_states_between_layers_are_part_of_the_plan(tiny_dir: Path) -> None:
    """They take a small share of the memory for experts; where all experts are in memory nothing is gained by them."""
    with Engine.load(tiny_dir) as engine:
        model, plan = engine.model, engine.model.plan
        assert plan is not None and plan.full and plan.prefill_width == plan.prefill_chunk
        token, wider = model.tier.hidden_size * 4, 0
        known = plan.resident_bytes + plan.adapter_bytes + plan.context_bytes
        for room in range(32 * plan.slot_nbytes, 64 * plan.slot_nbytes, plan.slot_nbytes):
            plan = model.plan_for(known + room)
            between = (plan.prefill_width - plan.prefill_chunk) * token
            assert plan.prefill_width % plan.prefill_chunk == 0
            assert between <= room / 32
            assert plan.workspace_bytes + plan.slots * plan.slot_nbytes <= room
            wider += between > 0
    assert wider > 0


@pytest.mark.parametrize(("context", "wider"), [(1, False), (200, True)])
def test_prompts_go_together_as_far_as_the_context_reaches(tiny_dir: Path, context: int, wider: bool) -> None:
    """Memory for wider ones would be taken from experts in vain."""
    with Engine.load(tiny_dir, context=context) as engine:
        model, plan = engine.model, engine.model.plan
        assert plan is not None
        known, slot = plan.resident_bytes + plan.adapter_bytes + plan.context_bytes, plan.slot_nbytes
        plans = [model.plan_for(known + room * slot) for room in range(48, 64)]
        assert any(plan.prefill_width > plan.prefill_chunk for plan in plans) == wider
        assert all(plan.prefill_width < context + plan.prefill_chunk for plan in plans)
