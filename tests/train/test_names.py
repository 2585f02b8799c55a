"""The table of names: complete, the same in both directions, and exact in values."""

from __future__ import annotations

import re

import pytest
import torch

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.families import family as family_named
from edge0_runtime.contract.tier import builtin_tier
from edge0_train.base import mlx_module, transformers_module
from edge0_train.base.links import hf_shape, to_hf, to_mlx
from edge0_train.base.load import empty_model, parameter_shapes
from edge0_train.base.names import mlx_config
from tests.tiny_ling import ling_config
from tests.tiny_models import ARCHITECTURE
from tests.twins import TWINS

NAMES = family_named("qwen3_5_moe")
FAMILIES = pytest.mark.parametrize("family", TWINS)


def shapes(family: str = "qwen3_5_moe", **overrides) -> dict[str, tuple[int, ...]]:
    names = family_named(family)
    return parameter_shapes(empty_model({**TWINS[family].config, **overrides}, names, torch.float32))


@FAMILIES
def test_every_parameter_has_a_row_and_every_row_a_parameter(family: str) -> None:
    names, config = family_named(family), TWINS[family].config
    links = {name: names.links_of_hf(name, config) for name in shapes(family)}
    assert [name for name, found in links.items() if not found] == []
    rows = {re.sub(r"\.layers\.\d+\.", ".layers.{n}.", name) for name in links}
    if family == "bailing_moe_v3":
        rows.add("model.layers.{n}.self_attn.q_proj.weight")  # also of latent attention without q_lora_rank
        assert names.links_of_hf("model.layers.3.self_attn.q_proj.weight", config)
    assert rows == {row.hf for row in names.table}


@FAMILIES
def test_both_directions_meet(family: str) -> None:
    names, seen = family_named(family), set()
    for name in shapes(family):
        for link in names.links_of_hf(name, TWINS[family].config):
            assert link.hf == name
            for mlx_name in link.mlx:
                found = names.link_of_mlx(mlx_name)
                assert found is not None and found.hf == name
                assert mlx_name not in seen or link.change == "channels"
                seen.add(mlx_name)


@FAMILIES
def test_values_survive_the_way_there_and_back(family: str) -> None:
    random, config = torch.Generator().manual_seed(0), TWINS[family].config
    for name, shape in shapes(family).items():
        for link in family_named(family).links_of_hf(name, config):
            value = torch.randn(shape, generator=random).bfloat16().float()
            parts = to_mlx(link, value, config)
            assert len(parts) == len(link.mlx)
            assert hf_shape(link, [part.shape for part in parts]) == shape
            back = to_hf(link, parts)
            assert torch.equal(back, value) or (link.change == "one_centred" and torch.allclose(back, value, atol=2e-7))


@pytest.mark.parametrize(
    ("layer", "name", "mlx"),
    [
        (0, "o_proj", "o_proj"), (3, "o_proj", "dense"), (3, "kv_b_proj", "kv_b_proj"), (0, "forget_gate.f_proj", "f_proj"),
    ],
)  # fmt: skip
def test_a_name_means_another_module_in_another_kind_of_layer(layer: int, name: str, mlx: str) -> None:
    config = TWINS["bailing_moe_v3"].config
    hf_path, mlx_path = f"model.layers.{layer}.self_attn.{name}", f"model.layers.{layer}.attention.{mlx}"
    assert mlx_module("bailing_moe_v3", hf_path, config) == mlx_path
    assert transformers_module("bailing_moe_v3", mlx_path) == hf_path


def test_gate_and_up_are_the_halves_of_the_fused_experts() -> None:
    (link,) = NAMES.links_of_hf("model.layers.2.mlp.experts.gate_up_proj", ARCHITECTURE)
    fused = torch.arange(2 * 6 * 4.0).view(2, 6, 4)
    gate, up = to_mlx(link, fused, ARCHITECTURE)
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


@pytest.mark.parametrize("name", ["35b", "8b", "nano"])
def test_every_lora_module_of_a_tier_maps_both_ways(name: str) -> None:
    tier = builtin_tier(name)
    paths = tier.lora_modules()
    mapped = [transformers_module(tier.family, path) for path in paths]
    assert [mlx_module(tier.family, path, tier.architecture) for path in mapped] == list(paths)
    assert len(mapped) == {"35b": 310, "8b": 153}.get(name, len(paths))


@FAMILIES
def test_lora_modules_are_linear_layers_of_the_transformers_model(family: str) -> None:
    tier = TWINS[family].tier()
    model = empty_model(TWINS[family].config, family_named(family), torch.float32)
    for path, (in_features, out_features) in tier.layout.linear_modules(tier.architecture).items():
        module = model.get_submodule(transformers_module(tier.family, path))
        assert (module.in_features, module.out_features) == (in_features, out_features), path


def test_the_8b_on_the_meta_device_has_the_tier_s_modules_and_router() -> None:
    """Full size, no values: every LoRA module's width, the experts, and the router's own numbers."""
    tier = builtin_tier("8b")
    config = ling_config(**tier.architecture, n_group=8, topk_group=4, moe_shared_expert_intermediate_size=512)
    model = empty_model(config, family_named(tier.family), torch.bfloat16)
    for path, (in_features, out_features) in tier.lora_modules().items():
        module = model.get_submodule(transformers_module(tier.family, path))
        assert (module.in_features, module.out_features) == (in_features, out_features), path
    for layer in tier.layout.moe_layers(tier.architecture):
        block = model.model.layers[layer].mlp
        assert block.experts.down_proj.shape == (128, 1536, 512)
        assert (block.gate.num_group, block.gate.topk_group, block.gate.routed_scaling_factor) == (8, 4, 2.5)
    assert not hasattr(model.model.layers[0].mlp, "gate")


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
    with pytest.raises(Edge0Error, match=r"'mamba' is not supported.*qwen3_5_moe"):
        family_named("mamba")


def test_only_vision_and_multi_token_prediction_are_dropped() -> None:
    for name in ("vision_tower.blocks.0.weight", "model.visual.patch.weight", "mtp.fc.weight"):
        assert NAMES.is_dropped(name, ARCHITECTURE)
    for name in ("language_model.model.norm.weight", "lm_head.weight", "model.layers.0.mtp_gate.weight"):
        assert not NAMES.is_dropped(name, ARCHITECTURE)


def test_what_belongs_to_no_model_of_ling_is_dropped() -> None:
    names, config = family_named("bailing_moe_v3"), TWINS["bailing_moe_v3"].config
    for name in ("model.layers.1.mlp.pregate.fc1.weight", "model.layers.4.attention.dense.weight"):
        assert names.is_dropped(name, config)
    for name in ("model.layers.3.mlp.pregate_fc1.weight", "model.layers.3.mlp.gate.weight", "model.norm.weight"):
        assert not names.is_dropped(name, config)


def test_ling_s_config_has_mlx_lm_s_names_whoever_saved_it() -> None:
    made = mlx_config(family_named("bailing_moe_v3"), {
        "model_type": "bailing_hybrid", "architectures": ["BailingHybridForCausalLM"], "_name_or_path": "x",
        "num_hidden_layers": 4, "first_k_dense_replace": 1, "layer_group_size": 4, "moe_intermediate_size": 64,
        "head_dim": 16, "linear_head_dim": 32, "num_expert_group": 4, "num_experts_per_token": 2,
        "model_max_length": 512, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    })  # fmt: skip
    assert made == {
        "model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"],
        "num_hidden_layers": 4, "first_k_dense_replace": 1, "layer_group_size": 4, "moe_intermediate_size": 64,
        "head_dim": 32, "n_group": 4, "num_experts_per_tok": 2, "max_position_embeddings": 512, "rope_theta": 1e4,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        "moe_shared_expert_intermediate_size": 64, "no_kda_lora": True, "kda_safe_gate": True,
    }  # fmt: skip


def test_a_flat_config_is_nested_and_completed_for_mlx() -> None:
    flat = {
        "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"], "_name_or_path": "x",
        "tie_word_embeddings": True, "dtype": "bfloat16",
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
    }  # fmt: skip
    made = mlx_config(NAMES, flat)
    text = made.pop("text_config")
    assert made == {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": True,
    }
    assert text["full_attention_interval"] == 2 and text["norm_topk_prob"] is True
    assert text["rope_theta"] == 1e7 and text["partial_rotary_factor"] == 0.25
    assert "_name_or_path" not in text and flat["rope_parameters"] == text["rope_parameters"]
    nested = mlx_config(NAMES, {"model_type": "qwen3_5_moe", "vision_config": {}, "text_config": text})
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
        mlx_config(NAMES, {"model_type": "qwen3_5_moe", "text_config": text})


def test_a_config_on_which_the_libraries_disagree_is_refused() -> None:
    with pytest.raises(Edge0Error, match="norm_topk_prob: False"):
        shapes(norm_topk_prob=False)
