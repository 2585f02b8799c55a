"""The base against mlx-lm: the same bits when quantising, the same logits when loaded.

Both libraries run in float32, on weights that are equal on both sides, so the logits differ by rounding only.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import torch
from mlx_lm.convert import convert
from mlx_lm.utils import load_model
from transformers import AutoModelForCausalLM

from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import builtin_tier
from edge0_train.base import affine, describe, load_base, load_teacher, quantize_checkpoint
from tests.parity.both import (
    assert_same_checkpoint,
    edit_config,
    logits_differ,
    same_bits,
    some_ids,
    tensors_of,
    to_mlx,
)
from tests.tiny_models import ARCHITECTURE, TEACHER, tiny_qwen3_5_moe, tiny_tier

# -- quantisation


def cases() -> dict[str, torch.Tensor]:
    """Matrices with everyday and edge groups."""
    w = torch.randn(2, 24, 256, generator=torch.Generator().manual_seed(0))
    ties, mixed = w.clone(), w * torch.logspace(-8, 3, 24)[:, None]
    ties[..., ::64], ties[..., 1::64] = 4.0, -4.0  # |min| = |max|
    mixed[..., :64] = 0
    mixed[..., 64:128] = 0.37
    return {
        "normal": w, "positive": w.abs(), "negative": -w.abs(), "tiny": w * 1e-6, "large": w * 3000,
        "ties": ties, "mixed": mixed, "zeros": w * 0, "constant": w * 0 - 0.1, "integers": w.mul(8).round(),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", affine.FLOATS)
@pytest.mark.parametrize("bits", affine.BITS)
@pytest.mark.parametrize("group_size", affine.GROUP_SIZES)
def test_quantize_and_dequantize_are_mlx_s_bit_for_bit(dtype: torch.dtype, bits: int, group_size: int) -> None:
    for name, values in cases().items():
        w = values.to(dtype)
        ours, theirs = affine.quantize(w, bits, group_size), mx.quantize(to_mlx(w), group_size, bits)
        for part, a, b in zip(("packed", "scales", "biases"), ours, theirs, strict=True):
            assert same_bits(a, b), (name, part)
        assert same_bits(affine.dequantize(*ours, bits, group_size), mx.dequantize(*theirs, group_size, bits)), name


@pytest.mark.parametrize("bits", affine.BITS)
def test_dequantize_once_is_what_mlx_multiplies_by_in_float32(bits: int) -> None:
    packed, scales, biases = affine.quantize(cases()["normal"][0].bfloat16(), bits)
    ours = affine.dequantize_once(packed, scales, biases, bits, 64, torch.float32)
    packed_mlx = mx.array(packed.numpy())
    theirs = mx.dequantize(packed_mlx, to_mlx(scales).astype(mx.float32), to_mlx(biases).astype(mx.float32), 64, bits)
    assert same_bits(ours, theirs)


VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
    "tied": {"tie_word_embeddings": True},
    "indivisible": {"moe_intermediate_size": 96},  # down_proj cannot be cut into groups: stays float
    "interval": {"full_attention_interval": 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_quantised_directory_is_mlx_lm_s_byte_for_byte(variant: str, tmp_path: Path) -> None:
    overrides = VARIANTS[variant]
    source = tiny_qwen3_5_moe(tmp_path / "hf", seed=1, **overrides)
    tier = tiny_tier(**{key: value for key, value in overrides.items() if key in ARCHITECTURE})
    summary = quantize_checkpoint(source, tmp_path / "ours", tier)
    convert(str(source), str(tmp_path / "theirs"), quantize=True)
    assert_same_checkpoint(tmp_path / "ours", tmp_path / "theirs")
    assert summary["tensors"] == len(tensors_of(tmp_path / "theirs"))
    assert summary["dtype"] == overrides.get("dtype", "bfloat16")
    assert not list(tmp_path.glob(".*"))


def test_the_cast_to_the_config_s_dtype_is_mlx_lm_s(tmp_path: Path) -> None:
    source = tiny_qwen3_5_moe(tmp_path / "hf", dtype="float32")
    edit_config(source, lambda config: config["text_config"].update(dtype="bfloat16"))
    quantize_checkpoint(source, tmp_path / "ours", tiny_tier())
    convert(str(source), str(tmp_path / "theirs"), quantize=True)
    assert_same_checkpoint(tmp_path / "ours", tmp_path / "theirs")
    tensors = tensors_of(tmp_path / "ours")
    assert tensors["language_model.model.layers.0.linear_attn.A_log"].dtype == torch.float32
    assert tensors["language_model.model.layers.0.linear_attn.dt_bias"].dtype == torch.bfloat16


def test_shards_hold_the_same_tensors(tmp_path: Path) -> None:
    source = tiny_qwen3_5_moe(tmp_path / "hf")
    quantize_checkpoint(source, tmp_path / "one", tiny_tier())
    summary = quantize_checkpoint(source, tmp_path / "many", tiny_tier(), shard_bytes=50_000)
    assert summary["shards"] == len(list((tmp_path / "many").glob("model-*.safetensors"))) > 3
    assert_same_checkpoint(tmp_path / "many", tmp_path / "one")
    one, many = (Checkpoint.open(tmp_path / name) for name in ("one", "many"))
    assert one.fingerprint() == many.fingerprint()
    for header, entry in many.entries.values():
        assert entry.start % {"U32": 4, "BF16": 2}[entry.dtype] == 0, (header.path, entry)
    load_model(tmp_path / "many")


def test_a_flat_directory_with_per_expert_names_gives_the_same(tmp_path: Path) -> None:
    source = tiny_qwen3_5_moe(tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(source)
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=loaded.dtype)
    model.load_state_dict(loaded.state_dict())
    flat = tmp_path / "flat"
    model.save_pretrained(flat)  # as a model trained from nothing: flat config, one tensor per expert
    assert "model.layers.0.mlp.experts.0.up_proj.weight" in tensors_of(flat)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(source / name, flat / name)
    quantize_checkpoint(source, tmp_path / "a", tiny_tier())
    quantize_checkpoint(flat, tmp_path / "b", tiny_tier())
    assert_same_checkpoint(tmp_path / "b", tmp_path / "a")
    assert not logits_differ(tmp_path / "b")


def test_tokenizer_files_come_along(tmp_path: Path) -> None:
    source = tiny_qwen3_5_moe(tmp_path / "hf")
    summary = quantize_checkpoint(source, tmp_path / "out", tiny_tier())
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= set(summary["copied"])
    for name in summary["copied"]:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


# -- logits


def test_the_base_has_mlx_lm_s_logits_whole_and_step_by_step(int4: Path) -> None:
    assert logits_differ(int4) == []


def test_a_tied_base_has_mlx_lm_s_logits(tmp_path: Path) -> None:
    quantize_checkpoint(tiny_qwen3_5_moe(tmp_path / "hf", tie_word_embeddings=True), tmp_path / "int4", tiny_tier())
    assert logits_differ(tmp_path / "int4") == []
    model, _ = load_base(tmp_path / "int4", tiny_tier())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_directory_that_mlx_lm_converted_loads(source: Path, tmp_path: Path) -> None:
    convert(str(source), str(tmp_path / "theirs"), quantize=True)
    assert logits_differ(tmp_path / "theirs") == []


def test_an_unquantised_mlx_directory_is_the_transformers_model(source: Path, tmp_path: Path) -> None:
    convert(str(source), str(tmp_path / "bf16"))
    base, report = load_base(tmp_path / "bf16", tiny_tier())
    teacher = load_teacher(source, dtype=torch.float32)
    assert report.modules == {}
    for name, tensor in teacher.state_dict().items():
        # bfloat16 w + 1 is rounded on disk: only the norms may differ, by that rounding
        loose = name.endswith("norm.weight") and "linear_attn" not in name
        assert torch.equal(base.state_dict()[name], tensor) or (
            loose and torch.allclose(base.state_dict()[name], tensor, atol=2**-8)
        ), name


def test_a_bfloat16_base_is_the_float32_base_rounded_once(int4: Path) -> None:
    full, _ = load_base(int4, tiny_tier(), dtype=torch.float32)
    half, _ = load_base(int4, tiny_tier(), dtype=torch.bfloat16)
    kept = set()
    for name, tensor in full.state_dict().items():
        other = half.state_dict()[name]
        if other.dtype == torch.float32:
            kept.add(name.split(".")[-2] if name.endswith("weight") else name.split(".")[-1])
            assert torch.equal(other, tensor), name
        else:
            assert torch.equal(other, tensor.bfloat16()), name
    assert kept == {"norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "A_log"}
    with torch.no_grad():
        assert half(some_ids(8)).logits.isfinite().all()


def test_the_base_is_frozen_and_leaves_the_random_state_alone(int4: Path) -> None:
    before = torch.get_rng_state()
    model, report = load_base(int4, tiny_tier())
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert report.modules == {4: 45, 8: 8} and report.dropped == 0
    assert report.fingerprint == Checkpoint.open(int4).fingerprint()
    size = describe(model)
    assert size.trainable == 0
    assert size.parameters == sum(p.numel() for p in model.parameters())
    assert size.bytes == 4 * (size.parameters + sum(b.numel() for b in model.buffers()))


def test_rotary_frequencies_are_those_of_from_pretrained(int4: Path, source: Path) -> None:
    base, _ = load_base(int4, tiny_tier())
    teacher = load_teacher(source, dtype=torch.float32)
    for name, buffer in teacher.named_buffers():
        assert torch.equal(dict(base.named_buffers())[name], buffer), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_a_dtype_that_is_no_base_dtype_is_refused(int4: Path, dtype: torch.dtype) -> None:
    with pytest.raises(Edge0Error, match=r"base\.dtype"):
        load_base(int4, tiny_tier(), dtype=dtype)


def test_the_nano_teacher_quantises_and_loads(tmp_path: Path) -> None:
    summary = quantize_checkpoint(TEACHER, tmp_path / "int4", builtin_tier("nano"))
    assert (summary["int4_modules"], summary["int8_modules"]) == (87, 16)
    assert logits_differ(tmp_path / "int4", builtin_tier("nano")) == []
    load_teacher(TEACHER, dtype=torch.float32)
