"""The table of names: complete, the same in both directions, and exact in values."""

from __future__ import annotations

import re

import pytest
import torch

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import builtin_tier
from edge0_train.base import mlx_module, transformers_module
from edge0_train.base.load import empty_model, parameter_shapes
from edge0_train.base.names import family_names
from tests.tiny_models import ARCHITECTURE, tiny_tier

NAMES = family_names("qwen3_5_moe")


def shapes(**overrides) -> dict[str, tuple[int, ...]]:
    return parameter_shapes(empty_model(ARCHITECTURE | overrides, NAMES, torch.float32))


def test_every_parameter_has_a_row_and_every_row_a_parameter() -> None:
    links = {name: NAMES.links_of_hf(name, ARCHITECTURE) for name in shapes()}
    assert [name for name, found in links.items() if not found] == []
    rows = {re.sub(r"\.layers\.\d+\.", ".layers.{n}.", name) for name in links}
    assert rows == {row.hf for row in NAMES.table}


def test_both_directions_meet() -> None:
    seen: set[str] = set()
    for name in shapes():
        (link,) = NAMES.links_of_hf(name, ARCHITECTURE)
        assert link.hf == name
        for mlx_name in link.mlx:
            assert NAMES.link_of_mlx(mlx_name) == link
            assert mlx_name not in seen
            seen.add(mlx_name)


def test_values_survive_the_way_there_and_back() -> None:
    random = torch.Generator().manual_seed(0)
    for name, shape in shapes().items():
        (link,) = NAMES.links_of_hf(name, ARCHITECTURE)
        value = torch.randn(shape, generator=random).bfloat16().float()
        parts = link.to_mlx(value, ARCHITECTURE)
        assert len(parts) == len(link.mlx)
        assert link.hf_shape([part.shape for part in parts]) == shape
        back = link.to_hf(parts)
        assert torch.equal(back, value) or (link.change == "one_centred" and torch.allclose(back, value, atol=2e-7))


def test_gate_and_up_are_the_halves_of_the_fused_experts() -> None:
    (link,) = NAMES.links_of_hf("model.layers.2.mlp.experts.gate_up_proj", ARCHITECTURE)
    fused = torch.arange(2 * 6 * 4.0).view(2, 6, 4)
    gate, up = link.to_mlx(fused, ARCHITECTURE)
    assert [name.split(".layers.")[1] for name in link.mlx] == [
        "2.mlp.switch_mlp.gate_proj.weight",
        "2.mlp.switch_mlp.up_proj.weight",
    ]
    assert torch.equal(gate, fused[:, :3]) and torch.equal(up, fused[:, 3:])
    assert link.disk[1] == "model.layers.2.mlp.experts.{e}.up_proj.weight"


def test_norms_are_shifted_by_one_except_the_gated_one() -> None:
    shifted = {row.hf.rsplit("layers.{n}.")[-1] for row in NAMES.table if row.change == "one_centred"}
    assert shifted == {
        "model.norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight",
        "self_attn.q_norm.weight", "self_attn.k_norm.weight",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["35b", "nano"])
def test_every_lora_module_of_a_tier_maps_both_ways(name: str) -> None:
    tier = builtin_tier(name)
    paths = tier.lora_modules()
    mapped = [transformers_module(tier.family, path) for path in paths]
    assert [mlx_module(tier.family, path, tier.architecture) for path in mapped] == list(paths)
    if name == "35b":
        assert len(mapped) == 310


def test_lora_modules_are_linear_layers_of_the_transformers_model() -> None:
    tier = tiny_tier()
    model = empty_model(ARCHITECTURE, NAMES, torch.float32)
    for path, (in_features, out_features) in tier.layout.linear_modules(tier.architecture).items():
        module = model.get_submodule(transformers_module(tier.family, path))
        assert (module.in_features, module.out_features) == (in_features, out_features), path


def test_a_module_path_by_example() -> None:
    assert (
        transformers_module("qwen3_5_moe", "language_model.model.layers.3.self_attn.q_proj")
        == "model.layers.3.self_attn.q_proj"
    )
    assert mlx_module("qwen3_5_moe", "model.layers.13.mlp.shared_expert.up_proj", ARCHITECTURE) == (
        "language_model.model.layers.13.mlp.shared_expert.up_proj"
    )


@pytest.mark.parametrize(
    "path",
    [
        "language_model.model.layers.3.self_attn.qq_proj",
        "language_model.model.layers.3.mlp.switch_mlp.up_proj",
        "language_model.model.layers.3.input_layernorm",
        "language_model.model.layers.3.linear_attn.conv1d",
        "model.layers.3.self_attn.q_proj",
        "",
    ],
)
def test_a_path_without_a_linear_module_is_an_error(path: str) -> None:
    with pytest.raises(Edge0Error, match="no linear module of that name"):
        transformers_module("qwen3_5_moe", path)


def test_an_unknown_family_names_the_known_ones() -> None:
    with pytest.raises(Edge0Error, match=r"'mamba' has no name table.*qwen3_5_moe"):
        family_names("mamba")


def test_only_vision_and_multi_token_prediction_are_dropped() -> None:
    for name in ("vision_tower.blocks.0.weight", "model.visual.patch.weight", "mtp.fc.weight"):
        assert NAMES.is_dropped(name, ARCHITECTURE)
    for name in ("language_model.model.norm.weight", "lm_head.weight", "model.layers.0.mtp_gate.weight"):
        assert not NAMES.is_dropped(name, ARCHITECTURE)


def test_a_flat_config_is_nested_and_completed_for_mlx() -> None:
    flat = {
        "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"], "_name_or_path": "x",
        "tie_word_embeddings": True, "dtype": "bfloat16",
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
    }  # fmt: skip
    made = NAMES.mlx_config(flat)
    text = made.pop("text_config")
    assert made == {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": True,
    }
    assert text["full_attention_interval"] == 2 and text["norm_topk_prob"] is True
    assert text["rope_theta"] == 1e7 and text["partial_rotary_factor"] == 0.25
    assert "_name_or_path" not in text and flat["rope_parameters"] == text["rope_parameters"]
    nested = NAMES.mlx_config({"model_type": "qwen3_5_moe", "vision_config": {}, "text_config": text})
    assert nested == {"model_type": "qwen3_5_moe", "text_config": text}


@pytest.mark.parametrize(
    "text",
    [
        {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]},
        {"layer_types": ["linear_attention", "full_attention"] * 2, "full_attention_interval": 4},
    ],
)
def test_attention_layers_that_mlx_cannot_express_are_refused(text) -> None:
    with pytest.raises(Edge0Error, match="layer_types"):
        NAMES.mlx_config({"model_type": "qwen3_5_moe", "text_config": text})


def test_a_config_on_which_the_libraries_disagree_is_refused() -> None:
    with pytest.raises(Edge0Error, match="norm_topk_prob: False"):
        shapes(norm_topk_prob=False)
