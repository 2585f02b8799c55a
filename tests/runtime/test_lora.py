"""The unmerged LoRA against a dense reference, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edge0_runtime.contract.artifacts import read_adapter
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import Lora
from edge0_runtime.engine import Engine
from edge0_runtime.lora import apply_lora

Q_PROJ = "language_model.model.layers.3.self_attn.q_proj"  # 64 -> 256
SPEC = Lora(4, 8.0, ("self_attn.q_proj",))


def dense(linear: Any) -> np.ndarray:
    """[out, in] in float64."""
    weight = mx.dequantize(linear.weight, linear.scales, linear.biases, linear.group_size, linear.bits)
    return np.array(weight, dtype=np.float64)


def factors(path: str, out_features: int, in_features: int, r: int = 4) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {
        f"{path}.lora_A": rng.standard_normal((r, in_features)).astype(np.float16),
        f"{path}.lora_B": rng.standard_normal((out_features, r)).astype(np.float16),
    }


def test_equals_the_dense_reference(tiny_dir: Path, plain_model: Callable[[Path, int], Any]) -> None:
    """Every target of the tier, among them modules with in != out in both directions."""
    adapter = read_adapter(tiny_dir / "lora_edge0_tiny.safetensors", "lora")
    model = plain_model(tiny_dir, 2)
    weights = {path: dense(dict(model.named_modules())[path]) for path in adapter.tier.lora_modules()}
    assert {np.sign(w.shape[0] - w.shape[1]) for w in weights.values()} == {-1, 0, 1}
    assert apply_lora(model, adapter.tensors, adapter.tier.lora, mx.float32) == len(weights)
    modules = dict(model.named_modules())
    rng = np.random.default_rng(4)
    for path, weight in weights.items():
        a, b = (adapter.tensors[f"{path}.lora_{half}"].astype(np.float64) for half in "AB")
        x = rng.standard_normal((3, weight.shape[1]))
        expected = x @ (weight + adapter.tier.lora.alpha / adapter.tier.lora.r * b @ a).T
        got = np.array(modules[path](mx.array(x.astype(np.float32))), dtype=np.float64)
        assert np.linalg.norm(got - expected) < 1e-5 * np.linalg.norm(expected), path


def test_served_logits_equal_a_network_with_dense_merged_weights(
    tiny_dir: Path, plain_model: Callable[[Path, int], Any], prompts: list[list[int]]
) -> None:
    """The whole network with every delta added to the float32 weight, so nothing is lost in merging."""
    adapter = read_adapter(tiny_dir / "lora_edge0_tiny.safetensors", "lora")
    model = plain_model(tiny_dir, 2)
    modules = dict(model.named_modules())
    for path in adapter.tier.lora_modules():
        a, b = (adapter.tensors[f"{path}.lora_{half}"].astype(np.float64) for half in "AB")
        merged = dense(modules[path]) + adapter.tier.lora.alpha / adapter.tier.lora.r * b @ a
        parent, _, name = path.rpartition(".")
        linear = mx.array(merged.astype(np.float32))
        modules[parent][name] = lambda x, w=linear: x @ w.T
    expected = np.array(model(mx.array([prompts[2]]))[0, -1])
    with Engine.load(tiny_dir, prerouter=False) as engine:
        (step,) = engine.generate(prompts[2], max_tokens=1, trace=True)
        assert engine.model.lora_modules == 31
    with Engine.load(tiny_dir, prerouter=False, lora=False) as engine:
        (without,) = engine.generate(prompts[2], max_tokens=1, trace=True)
    assert step.logits is not None and without.logits is not None
    size = np.linalg.norm(expected)
    assert np.linalg.norm(step.logits - expected) < 1e-4 * size
    assert np.linalg.norm(without.logits - expected) > 1e-1 * size


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({}, "no tensors"),
        (factors("language_model.model.layers.9.self_attn.q_proj", 256, 64), "layers.9.self_attn.q_proj is no module"),
        (factors("language_model.model.layers.3.input_layernorm", 64, 64), "not a linear module"),
        (factors(Q_PROJ, 64, 256), r"lora_A has shape \[4, 256\], the model wants \[4, 64\]"),
        (factors(Q_PROJ, 256, 64, r=5), r"lora_A has shape \[5, 64\].*lora_B has shape \[256, 5\]"),
        ({f"{Q_PROJ}.lora_A": np.zeros((4, 64), np.float16)}, "lora_B is missing"),
        ({f"{Q_PROJ}.lora_B": np.zeros((256, 4), np.float16)}, "lora_A is missing"),
        (factors(Q_PROJ, 256, 64) | {f"{Q_PROJ}.magnitude": np.zeros(4)}, "neither a lora_A nor a lora_B"),
    ],
)
def test_a_wrong_lora_is_refused(
    tiny_dir: Path, plain_model: Callable[[Path, int], Any], tensors: dict[str, np.ndarray], says: str
) -> None:
    with pytest.raises(Edge0Error, match=says):
        apply_lora(plain_model(tiny_dir, 2), tensors, SPEC, mx.float32)


def test_all_offenders_are_in_one_error(tiny_dir: Path, plain_model: Callable[[Path, int], Any]) -> None:
    tensors = factors("language_model.model.layers.9.nothing", 4, 4) | factors(Q_PROJ, 255, 64)
    with pytest.raises(Edge0Error) as caught:
        apply_lora(plain_model(tiny_dir, 2), tensors, SPEC, mx.float32)
    assert "layers.9.nothing" in str(caught.value) and "[255, 4]" in str(caught.value)
