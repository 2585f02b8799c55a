"""Qwen3.5-MoE: transformers' Qwen3_5MoeForCausalLM, mlx-lm's qwen3_5_moe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.base.families.table import FamilyNames, Link


def _table() -> tuple[Link, ...]:
    hf, mlx = "model.layers.{n}.", "language_model.model.layers.{n}."

    def row(path: str, **facts: Any) -> Link:
        return Link(hf + path, (mlx + path,), **facts)

    norms = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    linears = (
        *(f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")),
        "linear_attn.out_proj",
        *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
        *(f"mlp.shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    )

    def experts(hf_name: str, *projections: str) -> Link:
        return Link(
            f"{hf}mlp.experts.{hf_name}",
            tuple(f"{mlx}mlp.switch_mlp.{name}.weight" for name in projections),
            stored="int4",
            disk=tuple(f"{hf}mlp.experts.{{e}}.{name}.weight" for name in projections),
        )

    return (
        Link("model.embed_tokens.weight", ("language_model.model.embed_tokens.weight",), stored="int4"),
        Link("model.norm.weight", ("language_model.model.norm.weight",), "one_centred", float32=True),
        Link("lm_head.weight", ("language_model.lm_head.weight",), stored="int4"),
        *(row(f"{name}.weight", change="one_centred", float32=True) for name in norms),
        *(row(f"{name}.weight", stored="int4", linear=True) for name in linears),
        row("mlp.gate.weight", stored="int8"),
        row("mlp.shared_expert_gate.weight", stored="int8"),
        experts("gate_up_proj", "gate_proj", "up_proj"),
        experts("down_proj", "down_proj"),
        row("linear_attn.conv1d.weight", change="conv_axes"),
        row("linear_attn.norm.weight"),  # the gated norm is not one-centred
        row("linear_attn.A_log", float32=True, uncast=True),
        row("linear_attn.dt_bias"),
    )


def _mlx_config(config: Mapping[str, Any]) -> dict[str, Any]:
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


NAMES = FamilyNames(
    family="qwen3_5_moe",
    hf_model_type="qwen3_5_moe_text",
    table=_table(),
    disk_renames=((r"^model\.language_model\.", "model."),),
    dropped=(r"vision_tower", r"model\.visual", r"mtp\.", r"language_model\.mtp\."),
    agreed={"norm_topk_prob": True, "attention_bias": False},
    mlx_config=_mlx_config,
)
