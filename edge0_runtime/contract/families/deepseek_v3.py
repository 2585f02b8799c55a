"""DeepSeek-V3: transformers' DeepseekV3ForCausalLM, mlx-lm's deepseek_v3; latent attention, whose kv_b_proj mlx-lm absorbs."""

from typing import Any

from edge0_runtime.contract.families._blocks import (
    COMMON,
    GROUPED,
    GROUPED_FIELDS,
    GROUPED_ROWS,
    LAYER,
    PLAIN,
    Modules,
    dense_or_shared,
    flat_family,
    flat_table,
    latents,
)
from edge0_runtime.contract.family import Architecture
from edge0_runtime.contract.links import ABSORBED, ABSORBED_HALVES, Config, Link

_ATTENTION = (
    *LAYER.linears(*(f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"))),
    *LAYER.vectors("self_attn.q_a_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
    Link(
        f"{LAYER.hf}.self_attn.{ABSORBED}.weight",
        tuple(f"{LAYER.mlx}.self_attn.{name}.weight" for name in ABSORBED_HALVES),
        "absorbed",
        stored="int4",
    ),
    *LAYER.linears(f"self_attn.{ABSORBED}"),
)


def _modules(arch: Architecture, layer: int) -> Modules:
    hidden, heads, rank = arch["hidden_size"], arch["num_attention_heads"], arch.get("q_lora_rank")
    queries, latent = heads * (arch["qk_nope_head_dim"] + arch["qk_rope_head_dim"]), arch["kv_lora_rank"]
    low_rank = {"self_attn.q_proj": (hidden, queries)}
    if rank is not None:
        low_rank = {"self_attn.q_a_proj": (hidden, rank), "self_attn.q_b_proj": (rank, queries)}
    return {
        **low_rank,
        "self_attn.kv_a_proj_with_mqa": (hidden, latent + arch["qk_rope_head_dim"]),
        f"self_attn.{ABSORBED}": (latent, heads * (arch["qk_nope_head_dim"] + arch["v_head_dim"])),
        "self_attn.o_proj": (heads * arch["v_head_dim"], hidden),
    } | dense_or_shared(arch, layer)


def _yarn_or_none(config: Config) -> Any:
    """YaRN is the same on both sides, its attention factors included."""
    scaling = config.get("rope_scaling")
    return scaling if scaling and scaling.get("rope_type", scaling.get("type")) == "yarn" else None


FAMILY = flat_family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    table=flat_table(*GROUPED_ROWS, *_ATTENTION, gate="float"),
    agreed=PLAIN
    | {
        "attention_bias": False,
        "norm_topk_prob": True,
        "rope_interleave": True,
        "rope_scaling": _yarn_or_none,
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    required=(*COMMON, *GROUPED_FIELDS, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    optional=("q_lora_rank",),
    spared=("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    layer_modules=_modules,
    kept=lambda arch, layer: latents(arch),
    **GROUPED,
)
