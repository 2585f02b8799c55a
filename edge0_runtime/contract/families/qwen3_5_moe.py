"""Qwen3.5-MoE: transformers' Qwen3_5MoeForCausalLM, mlx-lm's qwen3_5_moe.

Most layers are gated delta nets, every `full_attention_interval`-th has full attention. A config.json has the language model
under `text_config`; transformers saves it flat.
"""

from __future__ import annotations

from typing import Any

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.families._blocks import (
    LayerRows,
    Modules,
    attention,
    interval_of_layer_types,
    is_linear,
    linear_or_full,
    mlp,
)
from edge0_runtime.contract.family import Architecture, Family, Fill
from edge0_runtime.contract.links import Config, Link

_LAYER = LayerRows(mlx="language_model.model.layers.{n}")


def _modules(arch: Architecture, layer: int) -> Modules:
    hidden = arch["hidden_size"]
    shared = mlp("mlp.shared_expert", hidden, arch["shared_expert_intermediate_size"])
    if not is_linear(arch, layer):
        return attention(arch, arch["head_dim"], gated=True) | shared
    keys = arch["linear_num_key_heads"] * arch["linear_key_head_dim"]
    values = arch["linear_num_value_heads"] * arch["linear_value_head_dim"]
    return {
        "linear_attn.in_proj_qkv": (hidden, 2 * keys + values),
        "linear_attn.in_proj_z": (hidden, values),
        "linear_attn.in_proj_a": (hidden, arch["linear_num_value_heads"]),
        "linear_attn.in_proj_b": (hidden, arch["linear_num_value_heads"]),
        "linear_attn.out_proj": (values, hidden),
    } | shared


def _table() -> tuple[Link, ...]:
    norms = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    return (
        Link("model.embed_tokens.weight", ("language_model.model.embed_tokens.weight",), stored="int4"),
        Link("model.norm.weight", ("language_model.model.norm.weight",), "one_centred", float32=True),
        Link("lm_head.weight", ("language_model.lm_head.weight",), stored="int4"),
        *_LAYER.vectors(*(f"{name}.weight" for name in norms), change="one_centred", float32=True),
        *_LAYER.linears(*(f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")), "linear_attn.out_proj"),
        *_LAYER.linears(*(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj"))),
        *_LAYER.mlp("mlp.shared_expert"),
        *_LAYER.vectors("mlp.gate.weight", "mlp.shared_expert_gate.weight", stored="int8"),
        *_LAYER.experts(),
        *_LAYER.vectors("linear_attn.conv1d.weight", change="conv_axes"),
        *_LAYER.vectors("linear_attn.norm.weight", "linear_attn.dt_bias"),  # the gated norm is not one-centred
        *_LAYER.vectors("linear_attn.A_log", float32=True, uncast=True),
    )


def _mlx_config(config: Config, fill: Fill) -> dict[str, Any]:
    """Nest a flat text config, and write out what mlx-lm would otherwise fill with its own defaults."""
    if "text_config" in config:
        top = {key: value for key, value in config.items() if key not in ("_name_or_path", "vision_config")}
        text = dict(config["text_config"])
    else:
        text = {key: value for key, value in config.items() if key not in ("_name_or_path", "architectures")}
        top = {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "tie_word_embeddings": text.get("tie_word_embeddings", False),
        }
    top["model_type"] = "qwen3_5_moe"
    text["model_type"] = "qwen3_5_moe_text"
    if "layer_types" in text:
        kinds = text["layer_types"]
        full = [n for n, kind in enumerate(kinds) if kind == "full_attention"]
        interval = text.setdefault("full_attention_interval", (full[0] if full else len(kinds)) + 1)
        if full != list(range(interval - 1, len(kinds), interval)):
            raise Edge0Error(
                f"config.json text_config.layer_types: full attention in layers {full}, but mlx-lm can only "
                f"have it in every full_attention_interval = {interval}th layer; correct the field or choose "
                "another model"
            )
    rope = text.get("rope_parameters") or {}
    for field in ("rope_theta", "partial_rotary_factor"):
        if field in rope:  # many mlx-lm classes read them flat, and fall back silently
            text.setdefault(field, rope[field])
    text.setdefault("norm_topk_prob", True)
    return top | {"text_config": text}


FAMILY = Family(
    name="qwen3_5_moe",
    hf_model_type="qwen3_5_moe_text",
    layer_prefix=_LAYER.mlx,
    embedding="language_model.model.embed_tokens",
    experts="mlp.switch_mlp",
    router="mlp.gate",
    hf_recurrent="linear_attn",
    is_recurrent=is_linear,
    disk_renames=((r"^model\.language_model\.", "model."),),
    dropped=(r"vision_tower", r"model\.visual", r"mtp\.", r"language_model\.mtp\."),
    table=_table(),
    agreed={"norm_topk_prob": True, "attention_bias": False},
    mlx_config=_mlx_config,
    required=(
        "num_hidden_layers", "hidden_size", "vocab_size", "num_experts", "num_experts_per_tok",
        "moe_intermediate_size", "shared_expert_intermediate_size", "full_attention_interval",
        "num_attention_heads", "num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_key_head_dim",
        "linear_num_value_heads", "linear_value_head_dim", "linear_conv_kernel_dim",
    ),
    derived={"full_attention_interval": interval_of_layer_types},
    layer_modules=_modules,
    kept=linear_or_full,
)  # fmt: skip
