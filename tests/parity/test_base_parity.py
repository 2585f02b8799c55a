"""The base against mlx-lm: the same bits when quantising, the same logits when loaded, and nothing left over.

Both libraries run in float32, on weights that are equal on both sides, so the logits differ by rounding only.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx_lm.convert import convert
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import builtin_tier
from edge0_train.base import affine, describe, load_base, load_teacher, quantize_checkpoint
from tests.tiny_models import ARCHITECTURE, TEACHER, tiny_qwen3_5_moe, tiny_tier

MLX_DTYPES = {torch.float32: mx.float32, torch.bfloat16: mx.bfloat16, torch.float16: mx.float16}
LOGITS_TOLERANCE = 1e-5  # relative L2; measured 3e-6 to 6e-6


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def to_mlx(tensor: torch.Tensor) -> mx.array:
    return mx.array(raw(tensor).numpy()).view(MLX_DTYPES[tensor.dtype]).reshape(tensor.shape)


def same_bits(ours: torch.Tensor, theirs: mx.array) -> bool:
    return tuple(ours.shape) == theirs.shape and np.array_equal(
        raw(ours).numpy(), np.array(theirs.reshape(-1).view(mx.uint8))
    )


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of all shards."""
    return {name: tensor for file in directory.glob("model*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_checkpoint(ours: Path, theirs: Path) -> None:
    """Names, dtypes, shapes and bytes of all tensors, and the quantization blocks."""
    a, b = tensors_of(ours), tensors_of(theirs)
    assert a.keys() == b.keys()
    for name, expected in b.items():
        assert (a[name].dtype, a[name].shape) == (expected.dtype, expected.shape), name
        assert torch.equal(raw(a[name]), raw(expected)), name
    configs = [json.loads((path / "config.json").read_text()) for path in (ours, theirs)]
    for field in ("quantization", "quantization_config"):
        assert configs[0][field] == configs[1][field]


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


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3_5_moe(tmp_path_factory.mktemp("tiny") / "hf")


@pytest.fixture(scope="module")
def int4(source: Path) -> Path:
    quantize_checkpoint(source, source.parent / "int4", tiny_tier())
    return source.parent / "int4"


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def some_ids(tokens: int = 70) -> torch.Tensor:
    return torch.randint(0, 384, (2, tokens), generator=torch.Generator().manual_seed(7))


def mlx_float32(directory: Path) -> Any:
    model, _ = load_model(directory)
    model.set_dtype(mx.float32)
    return model


def as_torch(array: mx.array) -> torch.Tensor:
    return torch.from_numpy(np.array(array))


@torch.no_grad()
def torch_steps(model: Any, ids: torch.Tensor, prefill: int) -> torch.Tensor:
    out = model(ids[:, :prefill], use_cache=True)
    logits = [out.logits]
    for t in range(prefill, ids.shape[1]):
        out = model(ids[:, t : t + 1], cache=out.cache, use_cache=True)
        logits.append(out.logits)
    return torch.cat(logits, dim=1)


def mlx_steps(model: Any, ids: torch.Tensor, prefill: int) -> torch.Tensor:
    cache = make_prompt_cache(model)
    logits = [as_torch(model(mx.array(ids[:, :prefill].numpy()), cache=cache))]
    for t in range(prefill, ids.shape[1]):
        logits.append(as_torch(model(mx.array(ids[:, t : t + 1].numpy()), cache=cache)))
    return torch.cat(logits, dim=1)


@torch.no_grad()
def logits_differ(directory: Path, tier: Any = None) -> list[str]:
    """The comparisons that fail: the whole sequence, and 20 tokens then single steps with a cache."""
    ids = some_ids()
    ours, _ = load_base(directory, tier or tiny_tier())
    theirs = mlx_float32(directory)
    whole = as_torch(theirs(mx.array(ids.numpy())))
    found = {
        "whole": relative(ours(ids).logits, whole),
        "torch steps": relative(torch_steps(ours, ids, 20), whole),
        "mlx steps": relative(mlx_steps(theirs, ids, 20), whole),
    }
    return [f"{name}: {value:.1e}" for name, value in found.items() if not value <= LOGITS_TOLERANCE]


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


# -- strictness

GATE = "language_model.model.layers.1.mlp.gate"
UP = "language_model.model.layers.2.mlp.switch_mlp.up_proj"
NORM = "language_model.model.norm.weight"


def edit_config(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))


def edited(directory: Path, out: Path, tensors: Callable | None = None, config: Callable | None = None) -> Path:
    """A copy of a directory with its tensors or its config.json changed in place."""
    shutil.copytree(directory, out)
    if tensors is not None:
        values = load_file(out / "model.safetensors")
        tensors(values)
        save_file({name: value.contiguous() for name, value in values.items()}, out / "model.safetensors")
    if config is not None:
        edit_config(out, config)
    return out


def put(name: str, value: Callable[[dict], torch.Tensor]) -> Callable[[dict], None]:
    return lambda tensors: tensors.__setitem__(name, value(tensors))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), rf"{NORM}: missing"),
        (lambda t: t.pop(f"{UP}.weight"), rf"{UP}\.weight: missing"),
        (lambda t: t.pop(f"{UP}.biases"), rf"{UP}: has .*scales but not the other"),
        (put(GATE.replace("1", "4"), lambda t: torch.zeros(2)), r"layers\.4\.mlp\.gate: the model has no place"),
        (put("language_model.model.norm.bias", lambda t: torch.zeros(64)), "norm.bias: the model has no place"),
        (put(NORM, lambda t: torch.ones(32)), r"norm.weight \[32\]: cannot be the model's model.norm.weight \[64\]"),
        (put(NORM, lambda t: torch.ones(64, 1)), "cannot be the model's model.norm.weight"),
        (put(NORM, lambda t: torch.ones(64, dtype=torch.int32)), "stored as I32"),
        (put(f"{UP}.weight", lambda t: t[f"{UP}.weight"][:4]), f"{UP}: .*differ in their rows"),
        (put(f"{UP}.weight", lambda t: t[f"{UP}.weight"].view(torch.int32)), f"{UP}: .*I32, BF16, BF16"),
        (put(f"{UP}.scales", lambda t: t[f"{UP}.scales"].float()), f"{UP}: .*U32, F32, BF16"),
        (put(f"{UP}.biases", lambda t: t[f"{UP}.biases"][:, :2]), f"{UP}: scales .* differ"),
        (
            put("language_model.model.layers.0.linear_attn.conv1d.weight", lambda t: torch.zeros(128, 1, 4)),
            r"conv1d.weight \[128, 1, 4\]: cannot be the model's",
        ),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_refused(int4: Path, tmp_path: Path, change: Callable, message: str) -> None:
    with pytest.raises(Edge0Error, match=message):
        load_base(edited(int4, tmp_path / "bad", tensors=change), tiny_tier())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: c["quantization"][GATE].update(bits=4),
            f"{GATE}: its shapes hold 8-bit codes, config.json says 4",
        ),
        (
            lambda c: c["quantization"].pop(GATE),
            f"{GATE}: its shapes hold 8-bit codes, config.json says 4 bits",
        ),
        (
            lambda c: c["quantization"].update(bits=8),
            f"{UP}: its shapes hold 4-bit codes, config.json says 8 bits",
        ),
        (
            lambda c: c["quantization"].update(group_size=32),
            f"{UP}: its shapes hold 8-bit codes, config.json says 4",
        ),
        (lambda c: c["quantization"].update({UP: False}), f"{UP}: has .scales, but config.json says"),
        (
            lambda c: (c.pop("quantization"), c.pop("quantization_config")),
            "has .scales, but config.json says",
        ),
        (lambda c: c["quantization"].update(mode="mxfp4"), "mode 'mxfp4'; only affine"),
        (lambda c: c["quantization"].pop("bits"), "lacks bits or group_size"),
        (lambda c: c["text_config"].update(num_experts=4), "num_experts: tier tiny has 8"),
        (lambda c: c["text_config"].update(norm_topk_prob=False), "norm_topk_prob: False"),
    ],
)
def test_a_contradicting_config_is_refused(int4: Path, tmp_path: Path, change: Callable, message: str) -> None:
    with pytest.raises(Edge0Error, match=message):
        load_base(edited(int4, tmp_path / "bad", config=change), tiny_tier())


def test_a_float_module_that_the_config_calls_quantised_is_refused(int4: Path, tmp_path: Path) -> None:
    def unquantise(tensors: dict[str, torch.Tensor]) -> None:
        parts = [tensors.pop(f"{GATE}.{part}") for part in ("weight", "scales", "biases")]
        tensors[f"{GATE}.weight"] = affine.dequantize(*parts, 8)

    bad = edited(int4, tmp_path / "bad", tensors=unquantise)
    with pytest.raises(Edge0Error, match=rf"{GATE}: config.json says 8 bits, but it has no \.scales"):
        load_base(bad, tiny_tier())
    edit_config(bad, lambda config: config["quantization"].pop(GATE))
    assert load_base(bad, tiny_tier())[1].modules == {4: 45, 8: 7}  # presence of .scales decides


def test_all_problems_are_told_at_once(int4: Path, tmp_path: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[NORM], tensors[f"{UP}.weight"]
        tensors["extra"] = torch.zeros(1)

    with pytest.raises(Edge0Error) as caught:
        load_base(edited(int4, tmp_path / "bad", tensors=damage), tiny_tier())
    for part in (NORM, f"{UP}.weight", "extra"):
        assert part in str(caught.value)
    assert f"{UP}.scales" not in str(caught.value)  # one fault, one line


def test_vision_and_mtp_tensors_are_dropped_and_counted(source: Path, int4: Path, tmp_path: Path) -> None:
    def add(*names: str) -> Callable[[dict], None]:
        return lambda tensors: tensors.update({name: torch.zeros(2) for name in names})

    more = edited(int4, tmp_path / "int4", tensors=add("vision_tower.a.weight", "mtp.fc.weight"))
    assert load_base(more, tiny_tier())[1].dropped == 2
    hf = edited(source, tmp_path / "hf", tensors=add("model.visual.a.weight", "mtp.fc.weight", "mtp.norm.weight"))
    assert quantize_checkpoint(hf, tmp_path / "out", tiny_tier())["dropped"] == 3
    assert_same_checkpoint(tmp_path / "out", int4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight: missing"),
        (
            lambda t: t.pop("model.language_model.layers.0.mlp.experts.down_proj"),
            "layers.0.mlp.experts.7.down_proj.weight: missing",
        ),
        (
            put("model.language_model.norm.bias", lambda t: torch.zeros(1)),
            "model.language_model.norm.bias: the model has no place",
        ),
        (
            put("model.norm.weight", lambda t: torch.zeros(64)),
            r"model\.(language_model\.)?norm\.weight: the same parameter as model\.(language_model\.)?norm",
        ),
        (
            put("lm_head.weight", lambda t: torch.zeros(384, 32)),
            r"lm_head.weight: F32 \[384, 32\], the model needs \[384, 64\]",
        ),
        (
            put("lm_head.weight", lambda t: torch.full((384, 64), float("inf"))),
            "lm_head.weight: has values that are not finite",
        ),
    ],
)  # fmt: skip
def test_a_damaged_source_is_refused_and_leaves_nothing(
    source: Path, tmp_path: Path, change: Callable, message: str
) -> None:
    bad = edited(source, tmp_path / "bad", tensors=change)
    with pytest.raises(Edge0Error, match=message):
        quantize_checkpoint(bad, tmp_path / "out", tiny_tier())
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


def test_an_existing_output_and_a_quantised_source_are_refused(source: Path, int4: Path, tmp_path: Path) -> None:
    with pytest.raises(Edge0Error, match="exists; delete it"):
        quantize_checkpoint(source, tmp_path, tiny_tier())
    with pytest.raises(Edge0Error, match="quantised"):
        quantize_checkpoint(int4, tmp_path / "out", tiny_tier())
    with pytest.raises(Edge0Error, match="num_experts: tier tiny has 16"):
        quantize_checkpoint(source, tmp_path / "out", tiny_tier(num_experts=16))
    (copy := edited(source, tmp_path / "copy")).joinpath("tokenizer.json").unlink()
    with pytest.raises(Edge0Error, match=r"no tokenizer\.json"):
        quantize_checkpoint(copy, tmp_path / "out", tiny_tier())


def test_a_teacher_must_be_complete(source: Path, tmp_path: Path) -> None:
    teacher = load_teacher(source, dtype=torch.bfloat16)
    assert not teacher.training and not any(p.requires_grad for p in teacher.parameters())
    assert teacher.dtype == torch.bfloat16
    with pytest.raises(Edge0Error, match=r"no config\.json"):
        load_teacher(tmp_path / "absent", dtype=torch.float32)
    for n, (change, message) in enumerate((
        (lambda t: t.pop("model.language_model.norm.weight"), r"missing_keys: model\.norm\.weight"),
        (put("model.language_model.extra", lambda t: torch.zeros(1)), "unexpected_keys: .*extra"),
        (put("model.language_model.norm.weight", lambda t: torch.zeros(32)), "mismatched_keys: .*norm.weight"),
    )):  # fmt: skip
        with pytest.raises(Edge0Error, match=message):
            load_teacher(edited(source, tmp_path / str(n), tensors=change), dtype=torch.float32)
