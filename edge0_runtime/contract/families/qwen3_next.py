"""Qwen3-Next: transformers' Qwen3NextForCausalLM, mlx-lm's qwen3_next; gated delta nets, and full attention in some layers."""

from typing import Any

from edge0_runtime.contract.families._blocks import (
    ALL_SPARSE,
    COMMON,
    LAYER,
    PLAIN,
    Modules,
    attention,
    flat_family,
    flat_table,
    interval_of_layer_types,
    is_linear,
    linear_or_full,
    mlp,
)
from edge0_runtime.contract.family import Architecture
from edge0_runtime.contract.links import Config

_ROWS = (
    *LAYER.linears("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj"),
    *LAYER.mlp("mlp.shared_expert"),
    *LAYER.vectors("mlp.shared_expert_gate.weight", stored="int8"),
    *LAYER.vectors("linear_attn.conv1d.weight", change="conv_axes"),
    *LAYER.vectors("linear_attn.norm.weight", "linear_attn.dt_bias"),  # the gated norm is not one-centred
    *LAYER.vectors("linear_attn.A_log", float32=True),
)


def _modules(arch: Architecture, layer: int) -> Modules:
    hidden = arch["hidden_size"]
    shared = mlp("mlp.shared_expert", hidden, arch["shared_expert_intermediate_size"])
    if not is_linear(arch, layer):
        return attention(arch, arch["head_dim"], gated=True) | shared
    keys = arch["linear_num_key_heads"] * arch["linear_key_head_dim"]
    values = arch["linear_num_value_heads"] * arch["linear_value_head_dim"]
    return {
        "linear_attn.in_proj_qkvz": (hidden, 2 * keys + 2 * values),
        "linear_attn.in_proj_ba": (hidden, 2 * arch["linear_num_value_heads"]),
        "linear_attn.out_proj": (values, hidden),
    } | shared


def _layer_types(config: Config) -> list[str]:
    arch = {"full_attention_interval": config.get("full_attention_interval", 4)}
    return ["linear_attention" if is_linear(arch, n) else "full_attention" for n in range(config["num_hidden_layers"])]


def _interval(full: dict[str, Any]) -> dict[str, Any]:
    """transformers says which layers have full attention, mlx-lm says every how manieth."""
    kinds = full["layer_types"]
    return {
        "full_attention_interval": kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    }


FAMILY = flat_family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    own=_interval,
    table=flat_table(*_ROWS, norm="one_centred"),
    hf_recurrent="linear_attn",
    is_recurrent=is_linear,
    agreed=PLAIN | ALL_SPARSE | {"attention_bias": False, "layer_types": _layer_types},
    required=(
        *COMMON, "num_key_value_heads", "head_dim", "num_experts", "moe_intermediate_size",
        "shared_expert_intermediate_size", "full_attention_interval", "linear_num_key_heads", "linear_key_head_dim",
        "linear_num_value_heads", "linear_value_head_dim", "linear_conv_kernel_dim",
    ),
    derived={"full_attention_interval": interval_of_layer_types},
    renormalises="norm_topk_prob",
    layer_modules=_modules,
    kept=linear_or_full,
)  # fmt: skip
