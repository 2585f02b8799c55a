"""Ling 3 through both libraries: what is quantised, what is published, and the LoRA of an absorbed projection."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import torch
from mlx_lm.convert import convert
from mlx_lm.utils import load_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.lora import apply_lora
from edge0_runtime.network import load_network
from edge0_train.base import load_base, load_teacher, quantize_checkpoint
from edge0_train.student import add_lora, load_lora
from tests.parity.both import (
    LOGITS_TOLERANCE,
    as_torch,
    assert_same_checkpoint,
    edit_config,
    edited,
    mlx_steps,
    put,
    relative,
    some_ids,
    tensors_of,
    torch_steps,
)
from tests.random_adapters import random_lora
from tests.tiny_ling import publish, tiny_ling, tiny_ling_tier
from tests.tiny_models import TOKENIZER_FILES
from tests.twins import TWINS

TIER = tiny_ling_tier(lora={"r": 4, "alpha": 8, "targets": list(TWINS["bailing_moe_v3"].targets)})
LATENT = "model.layers.3.attention"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_ling(tmp_path_factory.mktemp("ling") / "hf")


@pytest.fixture(scope="module")
def converted(source: Path) -> Path:
    quantize_checkpoint(source, source.parent / "int4", TIER)
    return source.parent / "int4"


@pytest.fixture(scope="module")
def published(source: Path, converted: Path) -> Path:
    return publish(converted, source, source.parent / "published")


# -- quantising


@pytest.mark.parametrize(
    "overrides", [{}, {"dtype": "float32"}, {"torch_dtype": "float16"}, {"first_k_dense_replace": 0}]
)
def test_a_quantised_directory_is_mlx_lm_s_byte_for_byte(overrides: dict[str, Any], tmp_path: Path) -> None:
    """`torch_dtype` casts everything (mlx-lm's class exempts nothing), `dtype` alone nothing: four stay float32."""
    source = tiny_ling(tmp_path / "hf", seed=1, **overrides)
    numbers = {key: value for key, value in overrides.items() if key in TIER.architecture}
    summary = quantize_checkpoint(source, tmp_path / "ours", tiny_ling_tier(**numbers))
    convert(str(source), str(tmp_path / "theirs"), quantize=True)
    assert_same_checkpoint(tmp_path / "ours", tmp_path / "theirs")
    assert summary["int8_modules"] == 0
    dtype = load_file(tmp_path / "ours/model.safetensors")["model.layers.1.mlp.gate.expert_bias"].dtype
    assert dtype == (torch.float16 if "torch_dtype" in overrides else torch.float32)


@pytest.mark.parametrize("original_format", [True, False])
def test_a_directory_saved_by_transformers_gives_the_same(
    source: Path, converted: Path, tmp_path: Path, original_format: bool
) -> None:
    """Its own field names, and `attention.dense` also where mlx-lm wants o_proj; or the names of the state_dict."""
    model = AutoModelForCausalLM.from_pretrained(source)
    model.save_pretrained(tmp_path / "saved", save_original_format=original_format)
    names, config = tensors_of(tmp_path / "saved"), json.loads((tmp_path / "saved/config.json").read_text())
    assert ("model.layers.0.attention.dense.weight" in names) == original_format
    assert config["head_dim"] == TIER.architecture["qk_rope_head_dim"] and "num_experts_per_tok" not in config
    for name in TOKENIZER_FILES:
        shutil.copyfile(source / name, tmp_path / "saved" / name)
    quantize_checkpoint(tmp_path / "saved", tmp_path / "out", TIER)
    ours, wanted = tensors_of(tmp_path / "out"), tensors_of(converted)
    assert ours.keys() == wanted.keys()
    for name, value in wanted.items():  # transformers keeps the convolutions in float32
        assert torch.equal(ours[name].to(value.dtype), value), name
    load_model(tmp_path / "out")


def test_an_unquantised_mlx_directory_is_the_transformers_model(source: Path, tmp_path: Path) -> None:
    convert(str(source), str(tmp_path / "mlx"))
    base, report = load_base(tmp_path / "mlx", TIER)
    assert report.modules == {}
    for name, tensor in load_teacher(source, dtype=torch.float32).state_dict().items():
        assert torch.equal(base.state_dict()[name], tensor), name


def test_a_bfloat16_base_keeps_float32_what_transformers_computes_in_it(published: Path) -> None:
    full, _ = load_base(published, TIER)
    half, _ = load_base(published, TIER, dtype=torch.bfloat16)
    kept = {name for name, value in half.state_dict().items() if value.dtype == torch.float32}
    assert kept == {
        name
        for name in half.state_dict()
        if name.endswith(("A_log", "dt_bias", "conv1d.weight", "mlp.gate.weight", "e_score_correction_bias"))
    }
    for name, tensor in full.state_dict().items():
        assert torch.equal(half.state_dict()[name], tensor if name in kept else tensor.bfloat16()), name
    with torch.no_grad():
        assert half(some_ids(8)).logits.isfinite().all()


@pytest.mark.parametrize("form", ["converted", "published"])
def test_a_packed_base_has_the_same_values(request: pytest.FixtureRequest, form: str) -> None:
    """kv_b_proj too: put together from its absorbed halves it stays float, packed in the file it stays packed."""
    directory, ids = request.getfixturevalue(form), some_ids(12)
    full, _ = load_base(directory, TIER)
    packed, _ = load_base(directory, TIER, packed="device")
    with torch.no_grad():
        assert torch.equal(packed(ids).logits, full(ids).logits)
    kv_b = packed.get_submodule("model.layers.3.self_attn.kv_b_proj")
    assert ("weight" in dict(kv_b.named_parameters())) == (form == "converted")


# -- logits


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("form", ["converted", "published"])
def test_logits_are_the_same_whole_and_step_by_step(request: pytest.FixtureRequest, form: str, lora: bool) -> None:
    """Steps matter: with one token mlx-lm's latent attention takes the other side of its absorbed projection."""
    directory = request.getfixturevalue(form)
    ids = some_ids(40)
    ours, _ = load_base(directory, TIER)
    theirs: Any = load_network(directory, TIER.layout, float32=True)
    theirs.set_dtype(mx.float32)
    if lora:
        bare = ours(ids).logits
        tensors = random_lora(TIER)
        load_lora(add_lora(ours, TIER), TIER, tensors)
        assert apply_lora(theirs, tensors, TIER.lora, mx.float32) == len(TIER.lora_modules()) == 3 * 5 + 4 + 2 + 3
    with torch.no_grad():
        whole = ours(ids).logits
    assert relative(as_torch(theirs(mx.array(ids.numpy()))), whole) <= LOGITS_TOLERANCE
    assert relative(mlx_steps(theirs, ids, 20), whole) <= LOGITS_TOLERANCE
    assert relative(torch_steps(ours, ids, 20), whole) <= LOGITS_TOLERANCE
    if lora:
        assert relative(bare, whole) > 0.1


@pytest.mark.parametrize("part", ["key", "value"])
def test_both_halves_of_the_absorbed_lora_matter(published: Path, part: str) -> None:
    """Only the rows of keys, or of values, in kv_b_proj's B: the logits follow transformers' either way."""
    tier = tiny_ling_tier(lora={"r": 4, "alpha": 8, "targets": ["attention.kv_b_proj"]})
    tensors = random_lora(tier)
    arch = tier.architecture
    rows = tensors[f"{LATENT}.kv_b_proj.lora_B"].reshape(arch["num_attention_heads"], -1, 4)
    nope = arch["qk_nope_head_dim"]
    (rows[:, nope:] if part == "key" else rows[:, :nope]).fill(0)
    ours, _ = load_base(published, tier)
    theirs: Any = load_network(published, tier.layout, float32=True)
    theirs.set_dtype(mx.float32)
    ids = some_ids(12)
    with torch.no_grad():
        bare = ours(ids).logits
        load_lora(add_lora(ours, tier), tier, tensors)
        whole = ours(ids).logits
    apply_lora(theirs, tensors, tier.lora, mx.float32)
    assert relative(as_torch(theirs(mx.array(ids.numpy()))), whole) <= LOGITS_TOLERANCE
    assert relative(mlx_steps(theirs, ids, 5), whole) <= LOGITS_TOLERANCE
    assert relative(bare, whole) > 1e-3


def test_mlx_lm_alone_refuses_the_published_layout(published: Path) -> None:
    with pytest.raises(ValueError, match="Quantized Bailing V3 kv_b_proj"):
        load_model(published)


def test_the_absorbed_projection_keeps_its_values(published: Path) -> None:
    """Not packed again; in a half-precision network rounded once."""
    base, _ = load_base(published, TIER)
    wanted = base.state_dict()["model.layers.3.self_attn.kv_b_proj.weight"]
    nope = TIER.architecture["qk_nope_head_dim"]
    for float32 in (True, False):
        modules = dict(load_network(published, TIER.layout, float32=float32).named_modules())
        halves = [modules[f"{LATENT}.{name}"].weight for name in ("embed_q", "unembed_out")]
        assert {half.dtype for half in halves} == {mx.float32 if float32 else mx.bfloat16}
        keys, values = (as_torch(half.astype(mx.float32)) for half in halves)
        rows = torch.cat([keys.mT, values], dim=1).flatten(0, 1)
        assert keys.shape[-1] == nope and torch.equal(rows, wanted if float32 else wanted.bfloat16().float())


# -- reading the published layout


def test_what_is_quantised_is_decided_by_scales(converted: Path, published: Path) -> None:
    _, report = load_base(converted, TIER)
    assert report.modules == {4: 39} and report.dropped == 0
    _, report = load_base(published, TIER)
    assert report.modules == {4: 47, 8: 1} and report.dropped == 3  # the heads in the file are of no model


def test_convolutions_may_have_either_library_s_axes(published: Path, tmp_path: Path) -> None:
    def turn(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "_conv1d." in name]:
            tensors[name] = tensors[name].movedim(2, 1)

    turned, _ = load_base(edited(published, tmp_path / "turned", tensors=turn), TIER)
    straight, _ = load_base(published, TIER)
    assert all(torch.equal(turned.state_dict()[name], value) for name, value in straight.state_dict().items())


UP = "model.layers.2.mlp.experts.up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{UP}.weight"), rf"{UP}\.weight: missing"),
        (lambda t: t.pop(f"{LATENT}.kv_b_proj.scales"), "kv_b_proj: has .*biases but not the other"),
        (put(f"{LATENT}.embed_q.weight", lambda t: torch.zeros(2, 64, 32)), "embed_q.weight: the model has no place"),
        (put("model.layers.4.mlp.gate.weight", lambda t: torch.zeros(2)), None),  # multi-token prediction: dropped
        (put("model.layers.1.mlp.pregate2.weight", lambda t: torch.zeros(2)), "pregate2.weight: the model has no"),
        (put("model.layers.1.attention.q_conv1d.weight", lambda t: torch.zeros(64, 4)), "conv1d.weight .*cannot be"),
    ],
)
def test_a_damaged_published_file_is_refused(
    published: Path, tmp_path: Path, change: Callable, message: str | None
) -> None:
    bad = edited(published, tmp_path / "bad", tensors=change)
    if message is None:
        assert load_base(bad, TIER)[1].dropped == 4
    else:
        with pytest.raises(Edge0Error, match=message):
            load_base(bad, TIER)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kda_safe_gate": False}, "kda_safe_gate: False"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps: 1e-05"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling: "),
        ({"moe_shared_expert_intermediate_size": 128}, "moe_shared_expert_intermediate_size: 128"),
        ({"num_hidden_layers": 3}, "num_hidden_layers: tier"),
    ],
)
def test_a_config_on_which_the_libraries_disagree_is_refused(
    published: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    bad = edited(published, tmp_path / "bad")
    edit_config(bad, lambda config: config.update(fields))
    with pytest.raises(Edge0Error, match=message):
        load_base(bad, TIER)


def test_an_unfinished_group_of_layers_is_refused(source: Path, tmp_path: Path) -> None:
    """mlx-lm takes its layers for latent attention, transformers for KDA."""
    config = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": 5}
    bad = tiny_ling(tmp_path / "bad")
    (bad / "config.json").write_text(json.dumps(config))
    with pytest.raises(Edge0Error, match="num_hidden_layers: 5; transformers and mlx-lm agree only at 4"):
        quantize_checkpoint(bad, tmp_path / "out", tiny_ling_tier(num_hidden_layers=5))


def test_layer_kinds_that_mlx_lm_cannot_express_are_refused(source: Path, tmp_path: Path) -> None:
    bad = edited(source, tmp_path / "bad", config=lambda c: c.update(layer_types=["full_attention"] * 4))
    with pytest.raises(Edge0Error, match=r"layer_types: not the layers of layer_group_size = 4"):
        quantize_checkpoint(bad, tmp_path / "out", TIER)
