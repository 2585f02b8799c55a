"""Families whose config.json is flat and whose tensors both libraries name alike, experts and vectors aside.

qwen3_moe, qwen3_next, olmoe, deepseek_v3 and glm4_moe, in transformers and in mlx-lm under the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from edge0_train.base.families.table import Change, Config, FamilyNames, Link, Stored

_LAYER = "model.layers.{n}."
_RENAMED = {"num_local_experts": "num_experts"}  # transformers' name of a field, and mlx-lm's


def _same(path: str, **facts: Any) -> Link:
    return Link(path, (path,), **facts)


def _linears(*paths: str) -> tuple[Link, ...]:
    return tuple(_same(f"{_LAYER}{path}.weight", stored="int4", linear=True) for path in paths)


def _mlp(path: str) -> tuple[Link, ...]:
    return _linears(*(f"{path}.{name}" for name in ("gate_proj", "up_proj", "down_proj")))


def _vectors(*paths: str, **facts: Any) -> tuple[Link, ...]:
    return tuple(_same(f"{_LAYER}{path}", **facts) for path in paths)


def _experts(hf_name: str, *projections: str) -> Link:
    return Link(
        f"{_LAYER}mlp.experts.{hf_name}",
        tuple(f"{_LAYER}mlp.switch_mlp.{name}.weight" for name in projections),
        stored="int4",
        disk=tuple(f"{_LAYER}mlp.experts.{{e}}.{name}.weight" for name in projections),
    )


def _table(*rows: Link, norm: Change = "same", gate: Stored = "int8") -> tuple[Link, ...]:
    """What all have, and a family's own rows."""
    float32 = norm == "one_centred"
    norms = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    return (
        _same("model.embed_tokens.weight", stored="int4"),
        _same("model.norm.weight", change=norm, float32=float32),
        _same("lm_head.weight", stored="int4"),
        *_vectors(*(f"{name}.weight" for name in norms), change=norm, float32=float32),
        *_linears(*(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj"))),
        _same(f"{_LAYER}mlp.gate.weight", stored=gate, float32=gate == "float"),
        _experts("gate_up_proj", "gate_proj", "up_proj"),
        _experts("down_proj", "down_proj"),
        *rows,
    )


_QWEN3_NEXT = (
    *_linears("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj"),
    *_mlp("mlp.shared_expert"),
    *_vectors("mlp.shared_expert_gate.weight", stored="int8"),
    *_vectors("linear_attn.conv1d.weight", change="conv_axes"),
    *_vectors("linear_attn.norm.weight", "linear_attn.dt_bias"),  # the gated norm is not one-centred
    *_vectors("linear_attn.A_log", float32=True),
)
_GROUPED = (
    *_vectors("mlp.gate.e_score_correction_bias", float32=True, uncast=True),
    *_mlp("mlp.shared_experts"),
    *_mlp("mlp"),  # dense layers
)
_DEEPSEEK_V3 = (
    *_linears(*(f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"))),
    *_vectors("self_attn.q_a_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
    Link(
        f"{_LAYER}self_attn.kv_b_proj.weight",
        tuple(f"{_LAYER}self_attn.{name}.weight" for name in ("embed_q", "unembed_out")),
        "absorbed",
        stored="int4",
    ),
    *_linears("self_attn.kv_b_proj"),
)
_GLM4_MOE = _vectors(*(f"self_attn.{name}_proj.bias" for name in ("q", "k", "v")))


def _mlx_config(
    hf_model_type: str, own: Callable[[dict[str, Any]], dict[str, Any]]
) -> Callable[[Config], dict[str, Any]]:
    """Every field written out, since mlx-lm fills what it misses with defaults of its own, which are not transformers'."""

    def made(config: Config) -> dict[str, Any]:
        given = {key: value for key, value in config.items() if key not in ("_name_or_path", "architectures")}
        fields = {key: value for key, value in given.items() if key not in ("model_type", "quantization_config")}
        anyones = PreTrainedConfig().to_dict().keys() - {"tie_word_embeddings"}
        filled = AutoConfig.for_model(hf_model_type, **fields).to_dict()
        full = given | {key: value for key, value in filled.items() if key not in anyones and key not in given}
        rope = filled["rope_parameters"]
        full |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        full = {_RENAMED.get(key, key): value for key, value in full.items()}
        full["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        return full | own(full) | {"model_type": hf_model_type, "architectures": [_CLASSES[hf_model_type]]}

    return made


def _interval(full: dict[str, Any]) -> dict[str, Any]:
    """qwen3_next: transformers says which layers have full attention, mlx-lm says every how manieth."""
    kinds = full["layer_types"]
    return {
        "full_attention_interval": kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    }


_CLASSES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
}
_PLAIN: dict[str, Any] = {"hidden_act": "silu", "rope_scaling": None}
_ALL_SPARSE: dict[str, Any] = {"mlp_only_layers": [], "decoder_sparse_step": 1}


def _yarn_or_none(config: Config) -> Any:
    """YaRN is the same on both sides, its attention factors included."""
    scaling = config.get("rope_scaling")
    return scaling if scaling and scaling.get("rope_type", scaling.get("type")) == "yarn" else None


def _names(
    family: str,
    table: tuple[Link, ...],
    agreed: Mapping[str, Any],
    own: Callable[[dict[str, Any]], dict[str, Any]] = lambda full: {},
    **facts: Any,
) -> FamilyNames:
    return FamilyNames(
        family=family,
        hf_model_type=family,
        table=table,
        disk_renames=(),
        dropped=(r"mtp\.", r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
        agreed=_PLAIN | dict(agreed),
        mlx_config=_mlx_config(family, own),
        **facts,
    )


FLAT_FAMILIES = (
    _names("qwen3_moe", _table(), {**_ALL_SPARSE, "attention_bias": False, "use_sliding_window": False}),
    _names(
        "qwen3_next",
        _table(*_QWEN3_NEXT, norm="one_centred"),
        {
            **_ALL_SPARSE,
            "attention_bias": False,
            "layer_types": lambda config: [
                "linear_attention" if (n + 1) % config.get("full_attention_interval", 4) else "full_attention"
                for n in range(config["num_hidden_layers"])
            ],
        },
        _interval,
    ),
    _names(
        "olmoe",
        _table(gate="int4"),
        {
            "attention_bias": False,
            "clip_qkv": None,  # mlx-lm does not clip
            "head_dim": lambda config: config["hidden_size"] // config["num_attention_heads"],
        },
    ),
    _names(
        "deepseek_v3",
        _table(*_GROUPED, *_DEEPSEEK_V3, gate="float"),
        {
            "attention_bias": False,
            "norm_topk_prob": True,
            "rope_interleave": True,
            "rope_scaling": _yarn_or_none,
            "moe_layer_freq": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
        spare_layers=True,
    ),
    _names(
        "glm4_moe",
        _table(*_GROUPED, *_GLM4_MOE, gate="float"),
        {"norm_topk_prob": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        spare_layers=True,
    ),
)
