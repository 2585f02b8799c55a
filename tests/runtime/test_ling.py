"""Ling 3 served from its published layout: the same tokens however the prompt is cut, and its errors."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from edge0_runtime.arms import ARMS
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.engine import Engine
from edge0_runtime.inspection import inspect
from edge0_runtime.lora import apply_lora
from edge0_runtime.network import load_network
from edge0_runtime.routing import route
from edge0_runtime.sequence import Sequence
from edge0_train.base import quantize_checkpoint
from tests.random_adapters import random_lora, write_adapters
from tests.tiny_ling import publish, tiny_ling, tiny_ling_tier
from tests.twins import TWINS

TIER = tiny_ling_tier(
    num_experts_per_tok=4, lora={"r": 4, "alpha": 8, "targets": list(TWINS["bailing_moe_v3"].targets)}
)
PROMPT = np.random.default_rng(3).integers(3, 384, size=11).tolist()
STEPS = 8


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ling")
    quantize_checkpoint(tiny_ling(root / "hf", num_experts_per_tok=4), root / "int4", TIER)
    return root / "int4"


@pytest.fixture(scope="module")
def published(converted: Path) -> Path:
    directory = publish(converted, converted.parent / "hf", converted.parent / "published")
    write_adapters(directory, TIER)
    return directory


def served(engine: Engine, chunks: list[list[int]]) -> tuple[list[int], np.ndarray]:
    """Greedy tokens and the experts [steps, MoE layers, K] of every step, the prompt given in chunks."""
    sequence = Sequence(engine.model)
    for chunk in chunks[:-1]:
        sequence.prefill(chunk, last=False)
    logits = sequence.prefill(chunks[-1], last=True)
    tokens, experts = [], []
    for _ in range(STEPS):
        assert logits is not None and sequence.last is not None
        tokens.append(int(logits.argmax()))
        experts.append(sequence.last.executed())
        logits = sequence.decode(tokens[-1])
    return tokens, np.stack(experts)


def test_how_the_prompt_is_cut_changes_nothing(published: Path) -> None:
    """A last chunk of one token too: latent attention takes the other side of its absorbed projection there."""
    with Engine.load(published) as engine:
        expected = served(engine, [PROMPT])
        assert engine.model.predicted_steps == STEPS
        for size in (1, 4, 5):
            chunks = [PROMPT[start : start + size] for start in range(0, len(PROMPT), size)]
            tokens, experts = served(engine, chunks)
            assert tokens == expected[0] and np.array_equal(experts, expected[1])
        assert engine.stats()["dropped_experts"] == 0


def test_arms_with_the_layers_own_gates_compute_the_same(published: Path) -> None:
    """On demand, from history and all resident, LoRA included; routing a layer from the one below is another model."""
    tokens = {}
    for arm in ARMS:
        with Engine.load(published, arm=arm) as engine:
            tokens[arm] = [step.token for step in engine.generate(PROMPT, max_tokens=10, ignore_eos=True)]
            assert engine.stats()["dropped_experts"] == 0
    assert tokens["on_demand"] == tokens["history"] == tokens["lookahead"] == tokens["resident"]
    assert len({tuple(tokens[arm]) for arm in ("prerouter", "same_token", "resident")}) == 3


def test_same_token_chooses_and_weighs_as_the_next_layers_gate_does(published: Path) -> None:
    """Against the gate itself on this layer's MoE input: score and expert bias, groups, scaling."""
    calls: list[tuple[int, mx.array, tuple[mx.array, mx.array]]] = []

    class Recorded:
        def __init__(self, layer: int, gate: Any) -> None:
            self.layer, self.gate = layer, gate

        def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
            calls.append((self.layer, x, self.gate(x)))
            return calls[-1][-1]

    with Engine.load(published, arm="same_token") as engine:
        blocks = {layer: engine.model.network.layers[layer].mlp for layer in (1, 2, 3)}
        gates = {layer: block.gate.inner for layer, block in blocks.items()}
        for layer, block in blocks.items():
            block.gate = Recorded(layer, block.gate)
        list(engine.generate(PROMPT, max_tokens=STEPS, ignore_eos=True))
    decoded, by_bias = [call for call in calls if call[1].size == TIER.hidden_size], 0
    decoded = decoded[-3 * (STEPS - 1) :]  # the prompt's last token goes alone, routed by the layers' own gates
    for (_, below, _), (layer, _, routing) in itertools.pairwise(decoded):
        if layer not in TIER.consumers:
            continue
        wanted = gates[layer](below)
        assert all(mx.array_equal(got, one) for got, one in zip(routing, wanted, strict=True))
        unbiased = route(TIER.router, below @ gates[layer].weight.T, TIER.k)[0]
        by_bias += set(np.array(unbiased).flat) != set(np.array(wanted[0]).flat)
    assert by_bias > 0


@pytest.mark.parametrize("arm", ["prerouter", "on_demand", "same_token", "history", "lookahead"])
def test_its_experts_stream_to_the_bit(published: Path, budget: Callable[..., float], arm: str) -> None:
    """Its gates choose themselves; budgets of a few slots compute what a model with all experts computes."""
    results = []
    for slots in (None, 1, 5, 14):
        gib = None if slots is None else budget(published, slots, arm=arm)
        with Engine.load(published, arm=arm, memory_budget=gib) as engine:
            steps = list(engine.generate(PROMPT, max_tokens=STEPS, ignore_eos=True, trace=True))
            assert engine.stats()["dropped_experts"] == 0
            assert (engine.stats()["expert_loads"] > 0) == (slots is not None)
        results.append([(step.token, step.experts.tobytes(), step.logits.tobytes()) for step in steps])
    assert all(result == results[0] for result in results)


def test_without_adapters_it_is_mlx_lm_s_own_model(converted: Path, tmp_path: Path) -> None:
    """Own gates, expert bias included, at the tier's K."""
    directory = tmp_path / "model"
    shutil.copytree(converted, directory)
    write_adapters(directory, TIER)
    network, _ = load_model(converted)
    network.set_dtype(mx.float32)
    for layer in network.layers[1:]:
        layer.mlp.gate.top_k = TIER.k
    cache = make_prompt_cache(network)
    logits, expected = network(mx.array([PROMPT]), cache=cache)[0, -1], []
    for _ in range(STEPS):
        expected.append(int(logits.argmax()))
        logits = network(mx.array([[expected[-1]]]), cache=cache)[0, -1]
    with Engine.load(directory, prerouter=False, lora=False) as engine:
        assert served(engine, [PROMPT])[0] == expected
    with Engine.load(directory, lora=False) as engine:
        assert served(engine, [PROMPT])[0] != expected


def test_a_router_that_chooses_otherwise_than_the_tier_is_refused(published: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(published, directory)
    config = json.loads((directory / "config.json").read_text())
    del config["topk_group"]  # mlx-lm would silently take its default
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(Edge0Error, match=r"topk_group: tier tiny-ling has 2, config\.json has nothing"):
        Engine.load(directory)


def test_inspect_counts_the_experts_under_either_name(converted: Path, published: Path) -> None:
    data = inspect(published)
    assert data["problems"] == [] and data["base"]["expert_bytes"] == 3 * 8 * (3 * 64 * 64 // 2 + 3 * 64 * 64 // 64 * 4)


def test_a_lora_that_does_not_fit_the_absorbed_projection_is_refused(published: Path) -> None:
    network = load_network(published, TIER.layout, float32=True)
    path, tensors = "model.layers.3.attention.kv_b_proj", random_lora(TIER)
    tensors[f"{path}.lora_B"] = tensors[f"{path}.lora_B"][:-1]
    tensors[f"{path}.lora_A"] = tensors[f"{path}.lora_A"].T
    with pytest.raises(Edge0Error) as error:
        apply_lora(network, tensors, TIER.lora, mx.float32)
    assert f"{path}.lora_A has shape [64, 4], the model wants [4, 64]" in str(error.value)
    assert f"{path}.lora_B has shape [159, 4], the model wants [160, 4]" in str(error.value)
    stranger = {f"model.layers.0.attention.kv_b_proj.lora_{half}": np.zeros((4, 4)) for half in "AB"}
    with pytest.raises(Edge0Error, match=r"layers\.0\.attention\.kv_b_proj is no module of the model"):
        apply_lora(network, stranger, TIER.lora, mx.float32)
