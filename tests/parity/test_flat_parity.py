"""The families with a flat config.json through both libraries: the same bits when quantised, the same logits when loaded."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import torch
from mlx_lm.convert import convert
from mlx_lm.utils import load_model

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import Router
from edge0_runtime.network import load_network
from edge0_train.base import load_base, load_teacher, quantize_checkpoint
from edge0_train.base.names import mlx_config
from edge0_train.propose import propose
from recipes.bring_your_own_moe.tiny import FLAT, tiny_flat
from tests.parity.both import (
    LOGITS_TOLERANCE,
    as_torch,
    assert_same_checkpoint,
    edit_config,
    mlx_steps,
    relative,
    some_ids,
    torch_steps,
)

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32,
    "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FLAT},
    "qwen3_moe, not renormalised, tied": ("qwen3_moe", {"norm_topk_prob": False, "tie_word_embeddings": True}),
    "olmoe, renormalised": ("olmoe", {"norm_topk_prob": True}),
    "qwen3_next, every second": ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"] * 2}),
    "deepseek_v3, no low rank, ungrouped": ("deepseek_v3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "deepseek_v3, all sparse, another epsilon": ("deepseek_v3", {"first_k_dense_replace": 0, "rms_norm_eps": 1e-3}),
    "deepseek_v3, YaRN": ("deepseek_v3", {"rope_parameters": YARN, "max_position_embeddings": 64}),
    "glm4_moe, no biases, no norms": ("glm4_moe", {"attention_bias": False, "use_qk_norm": False}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_libraries_have_the_same_bits_and_logits(variant: str, tmp_path: Path) -> None:
    """`save_pretrained`'s directory in both libraries; the int4 one, whole and step by step; and its bytes."""
    family, overrides = VARIANTS[variant]
    source = tiny_flat(tmp_path / "hf", family, dtype="float32", **overrides)
    tier = propose(source).tier
    assert tier.router.renormalise == overrides.get("norm_topk_prob", family != "olmoe")
    quantize_checkpoint(source, tmp_path / "int4", tier)

    readable = tmp_path / "mlx"  # the same tensors, config.json as mlx-lm wants it
    shutil.copytree(source, readable)
    config = mlx_config(tier.layout, json.loads((source / "config.json").read_text()))
    (readable / "config.json").write_text(json.dumps(config))
    convert(str(readable), str(tmp_path / "theirs"), quantize=True)
    assert_same_checkpoint(tmp_path / "int4", tmp_path / "theirs")

    ids = some_ids(40)
    pairs = [
        (load_teacher(source, dtype=torch.float32), load_model(readable)[0]),
        (load_base(tmp_path / "int4", tier)[0], load_network(tmp_path / "int4", tier.layout, float32=True)),
    ]
    for ours, theirs in pairs:
        theirs.set_dtype(mx.float32)
        with torch.no_grad():
            logits = ours(ids).logits
        whole = as_torch(theirs(mx.array(ids.numpy())))
        for other in (whole, mlx_steps(theirs, ids, 20), torch_steps(ours, ids, 20)):
            assert relative(other, logits) < LOGITS_TOLERANCE


@pytest.mark.parametrize("family", FLAT)
def test_a_bfloat16_base_is_the_float32_base_rounded_once(family: str, tmp_path: Path) -> None:
    source = tiny_flat(tmp_path / "hf", family)
    tier = propose(source).tier
    quantize_checkpoint(source, tmp_path / "int4", tier)
    full, _ = load_base(tmp_path / "int4", tier)
    half, _ = load_base(tmp_path / "int4", tier, dtype=torch.bfloat16)
    kept = {name for name, value in half.state_dict().items() if value.dtype == torch.float32}
    suffixes = {
        "qwen3_next": ("layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight", "A_log"),
        "deepseek_v3": ("mlp.gate.weight", "e_score_correction_bias"),
        "glm4_moe": ("mlp.gate.weight", "e_score_correction_bias"),
    }
    assert kept == {name for name in half.state_dict() if name.endswith(suffixes.get(family, ("none",)))}
    for name, tensor in full.state_dict().items():
        assert torch.equal(half.state_dict()[name], tensor if name in kept else tensor.bfloat16()), name
    with torch.no_grad():
        assert half(some_ids(8)).logits.isfinite().all()


def test_a_tier_must_renormalise_as_its_base_does(tmp_path: Path) -> None:
    source = tiny_flat(tmp_path / "hf", "olmoe")
    tier = dataclasses.replace(propose(source).tier, router=Router("softmax_topk"))
    with pytest.raises(Edge0Error, match=r"norm_topk_prob: tier hf-k2 has True, config\.json has False"):
        quantize_checkpoint(source, tmp_path / "int4", tier)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers: \[1\]; transformers and mlx-lm agree only at \[\]"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias: True"),
        ("qwen3_next", {"layer_types": ["full_attention", "linear_attention"] * 2}, "layer_types: "),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv: 8.0"),
        ("qwen3_moe", {"rope_parameters": YARN}, "rope_scaling: "),
        (
            "deepseek_v3",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
            "rope_scaling: ",
        ),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob: False"),
    ],
)
def test_what_the_libraries_compute_differently_is_refused(
    family: str, change: dict[str, Any], message: str, tmp_path: Path
):
    source = tiny_flat(tmp_path, family)
    edit_config(source, lambda config: config.update(change))
    with pytest.raises(Edge0Error, match=message):
        propose(source)
