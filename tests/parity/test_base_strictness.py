"""Reading and quantising a base: nothing damaged is taken, and nothing is left over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.base import affine, load_base, load_teacher, quantize_checkpoint
from tests.parity.both import (
    assert_same_checkpoint,
    edit_config,
    edited,
    put,
)
from tests.tiny_models import tiny_tier

GATE = "language_model.model.layers.1.mlp.gate"
UP = "language_model.model.layers.2.mlp.switch_mlp.up_proj"
NORM = "language_model.model.norm.weight"


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
