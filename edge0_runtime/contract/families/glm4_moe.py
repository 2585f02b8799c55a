"""GLM-4.5: transformers' Glm4MoeForCausalLM, mlx-lm's glm4_moe."""

from edge0_runtime.contract.families._blocks import (
    COMMON,
    GROUPED,
    GROUPED_FIELDS,
    GROUPED_ROWS,
    LAYER,
    PLAIN,
    attention,
    dense_or_shared,
    flat_family,
    flat_table,
    keys_and_values,
)

_BIASES = LAYER.vectors(*(f"self_attn.{name}_proj.bias" for name in ("q", "k", "v")))

FAMILY = flat_family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    table=flat_table(*GROUPED_ROWS, *_BIASES, gate="float"),
    agreed=PLAIN | {"norm_topk_prob": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    required=(*COMMON, *GROUPED_FIELDS, "num_key_value_heads", "head_dim"),
    layer_modules=lambda arch, layer: attention(arch, arch["head_dim"]) | dense_or_shared(arch, layer),
    kept=lambda arch, layer: keys_and_values(arch, arch["head_dim"]),
    **GROUPED,
)
