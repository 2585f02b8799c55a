"""Qwen3-MoE: transformers' Qwen3MoeForCausalLM, mlx-lm's qwen3_moe."""

from edge0_runtime.contract.families._blocks import (
    ALL_SPARSE,
    COMMON,
    PLAIN,
    attention,
    flat_family,
    flat_table,
    keys_and_values,
)

FAMILY = flat_family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    table=flat_table(),
    agreed=PLAIN | ALL_SPARSE | {"attention_bias": False, "use_sliding_window": False},
    required=(*COMMON, "num_key_value_heads", "head_dim", "num_experts", "moe_intermediate_size"),
    aliases={"num_experts": "num_local_experts"},
    renormalises="norm_topk_prob",
    layer_modules=lambda arch, layer: attention(arch, arch["head_dim"]),
    kept=lambda arch, layer: keys_and_values(arch, arch["head_dim"]),
)
