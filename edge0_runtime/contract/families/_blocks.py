"""What families have in common: shapes of attention and MLPs, rows of the table of names, and flat config.json files.

A flat family's config.json has no `text_config`, and both libraries name its tensors alike, experts and vectors aside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edge0_runtime.contract.family import PROJECTIONS, Architecture, Family, Fill, Kept
from edge0_runtime.contract.links import Change, Config, Link, Stored

Modules = dict[str, tuple[int, int]]
"""{path below a layer: (in_features, out_features)}."""
COMMON = ("num_hidden_layers", "hidden_size", "vocab_size", "num_experts_per_tok", "num_attention_heads")
"""Fields of a flat config.json that shapes follow from."""

# -- shapes ------------------------------------------------------------------------------------------------------------


def attention(arch: Architecture, head_dim: int, *, gated: bool = False) -> Modules:
    """Grouped-query attention; a gated one has per head [query ; output gate] in q_proj."""
    hidden = arch["hidden_size"]
    queries, keys = arch["num_attention_heads"] * head_dim, arch["num_key_value_heads"] * head_dim
    return {
        "self_attn.q_proj": (hidden, (1 + gated) * queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
    }


def keys_and_values(arch: Architecture, head_dim: int) -> Kept:
    """Of grouped-query attention."""
    return Kept(token=2 * arch["num_key_value_heads"] * head_dim, scores=arch["num_attention_heads"])


def latents(arch: Architecture) -> Kept:
    """Of latent attention: keys and values in one, and the rotary key that all heads share."""
    heads = arch["num_attention_heads"]
    return Kept(
        token=arch["kv_lora_rank"] + arch["qk_rope_head_dim"],
        scores=2 * heads,  # of the rotary part, and of both
        unfolded=heads * (arch["qk_nope_head_dim"] + arch["v_head_dim"]),
    )


def mlp(path: str, hidden: int, width: int) -> Modules:
    return {
        f"{path}.gate_proj": (hidden, width),
        f"{path}.up_proj": (hidden, width),
        f"{path}.down_proj": (width, hidden),
    }


def sparse_after_dense(arch: Architecture, layer: int) -> bool:
    """Whether a layer has routed experts, in a family whose first layers are dense."""
    return bool(layer >= arch["first_k_dense_replace"])


def dense_or_shared(arch: Architecture, layer: int, shared: str = "n_shared_experts") -> Modules:
    """A dense layer's MLP, or the shared experts of a MoE layer; `shared` is the field that counts them."""
    if not sparse_after_dense(arch, layer):
        return mlp("mlp", arch["hidden_size"], arch["intermediate_size"])
    return mlp("mlp.shared_experts", arch["hidden_size"], arch["moe_intermediate_size"] * arch[shared])


# -- rows of the table -------------------------------------------------------------------------------------------------


def same(path: str, **facts: Any) -> Link:
    """A parameter that both libraries name alike."""
    return Link(path, (path,), **facts)


class LayerRows:
    """Rows of a decoder layer's parameters that both libraries name alike below it.

    Args:
        mlx: the layer's path in MLX. hf: in transformers.
    """

    def __init__(self, mlx: str = "model.layers.{n}", hf: str = "model.layers.{n}") -> None:
        self.mlx, self.hf = mlx, hf

    def vectors(self, *paths: str, **facts: Any) -> tuple[Link, ...]:
        """Parameters that are stored in floats, if `facts` don't say otherwise."""
        return tuple(Link(f"{self.hf}.{path}", (f"{self.mlx}.{path}",), **facts) for path in paths)

    def linears(self, *paths: str) -> tuple[Link, ...]:
        """Linear modules that a LoRA may sit on."""
        return self.vectors(*(f"{path}.weight" for path in paths), stored="int4", linear=True)

    def mlp(self, path: str) -> tuple[Link, ...]:
        return self.linears(*(f"{path}.{projection}" for projection in PROJECTIONS))

    def experts(self, below: str = "mlp.switch_mlp", **facts: Any) -> tuple[Link, ...]:
        """The routed experts: fused, with gate and up in one, in transformers' model, and stacked `below` a layer in MLX's."""
        return tuple(
            Link(
                f"{self.hf}.mlp.experts.{fused}",
                tuple(f"{self.mlx}.{below}.{name}.weight" for name in projections),
                stored="int4",
                disk=tuple(f"{self.hf}.mlp.experts.{{e}}.{name}.weight" for name in projections),
                **facts,
            )
            for fused, projections in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",)))
        )


LAYER = LayerRows()


def flat_table(*rows: Link, norm: Change = "same", gate: Stored = "int8") -> tuple[Link, ...]:
    """What all flat families have, and a family's own rows."""
    float32 = norm == "one_centred"
    norms = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    return (
        same("model.embed_tokens.weight", stored="int4"),
        same("model.norm.weight", change=norm, float32=float32),
        same("lm_head.weight", stored="int4"),
        *LAYER.vectors(*(f"{name}.weight" for name in norms), change=norm, float32=float32),
        *LAYER.linears(*(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj"))),
        *LAYER.vectors("mlp.gate.weight", stored=gate, float32=gate == "float"),
        *LAYER.experts(),
        *rows,
    )


# -- families ----------------------------------------------------------------------------------------------------------

GROUPED_ROUTER: dict[str, Any] = {
    "router_kind": "sigmoid_group",
    "router_fields": {
        "n_group": ("n_group", 1),
        "topk_group": ("topk_group", 1),
        "scaling": ("routed_scaling_factor", 1.0),
    },
}
"""Facts of a family whose router takes sigmoids, and the best of groups of experts."""

GROUPED: dict[str, Any] = {
    **GROUPED_ROUTER,
    "expert_bias": "e_score_correction_bias",
    "num_experts": "n_routed_experts",
    "from_zero": ("first_k_dense_replace",),
    "is_moe": sparse_after_dense,
    "spare_layers": True,
}
"""Facts of a flat family of DeepSeek-V3's kind: such a router, and dense layers first."""
GROUPED_FIELDS = ("n_routed_experts", "moe_intermediate_size", "n_shared_experts", "intermediate_size")
GROUPED_ROWS = (
    *LAYER.vectors("mlp.gate.e_score_correction_bias", float32=True, uncast=True),
    *LAYER.mlp("mlp.shared_experts"),
    *LAYER.mlp("mlp"),  # dense layers
)

PLAIN: dict[str, Any] = {"hidden_act": "silu", "rope_scaling": None}
ALL_SPARSE: dict[str, Any] = {"mlp_only_layers": [], "decoder_sparse_step": 1}
"""What the libraries agree on: of all flat families, and where every layer has experts."""


def flat_family(
    name: str, hf_class: str, *, own: Callable[[dict[str, Any]], dict[str, Any]] = lambda full: {}, **facts: Any
) -> Family:
    """A flat family whose decoder layers have the usual paths in both libraries.

    Args:
        name: in both libraries. hf_class: transformers' class, for config.json.
        own: (the whole config.json) -> fields of it that mlx-lm needs beside them.
        facts: of `Family`.
    """
    return Family(
        name=name,
        hf_model_type=name,
        layer_prefix="model.layers.{n}",
        embedding="model.embed_tokens",
        experts="mlp.switch_mlp",
        router="mlp.gate",
        dropped=(r"mtp\.", r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
        mlx_config=_flat_config(name, hf_class, own),
        **facts,
    )


_RENAMED = {"num_local_experts": "num_experts"}  # transformers' name of a field, and mlx-lm's


def _flat_config(
    model_type: str, hf_class: str, own: Callable[[dict[str, Any]], dict[str, Any]]
) -> Callable[[Config, Fill], dict[str, Any]]:
    """Every field written out, since mlx-lm fills what it misses with defaults of its own, which are not transformers'."""

    def made(config: Config, fill: Fill) -> dict[str, Any]:
        given = {key: value for key, value in config.items() if key not in ("_name_or_path", "architectures")}
        fields = {key: value for key, value in given.items() if key not in ("model_type", "quantization_config")}
        filled = fill(model_type, fields)
        full = given | {key: value for key, value in filled.items() if key not in given}
        rope = filled["rope_parameters"]
        full |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        full = {_RENAMED.get(key, key): value for key, value in full.items()}
        full["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        return full | own(full) | {"model_type": model_type, "architectures": [hf_class]}

    return made


# -- layers of linear and of full attention ------------------------------------------------------------------------------


def is_linear(arch: Architecture, layer: int) -> bool:
    """Whether the layer's mixer is recurrent, where every `full_attention_interval`-th has full attention."""
    return bool((layer + 1) % arch["full_attention_interval"] != 0)


def linear_or_full(arch: Architecture, layer: int) -> Kept:
    """Of a gated delta net, or of the full attention in its place."""
    if not is_linear(arch, layer):
        return keys_and_values(arch, arch["head_dim"])
    keys = arch["linear_num_key_heads"] * arch["linear_key_head_dim"]
    values = arch["linear_num_value_heads"] * arch["linear_value_head_dim"]
    inputs = (arch["linear_conv_kernel_dim"] - 1) * (2 * keys + values)
    return Kept(inputs=inputs, state=values * arch["linear_key_head_dim"])


def interval_of_layer_types(config: Config, plain: Any) -> Any:
    """`full_attention_interval` by `layer_types`, transformers' form of it; where they contradict each other, what is said."""
    if "layer_types" not in config:
        return plain
    kinds, field = config["layer_types"], "full_attention_interval"
    full = [kind == "full_attention" for kind in kinds] if isinstance(kinds, list) else []
    interval = full.index(True) + 1 if True in full else 0
    if not interval or full != [(n + 1) % interval == 0 for n in range(len(full))]:
        return kinds
    if config.get(field, interval) != interval:
        return f"{config[field]}, but layer_types that imply {interval}"
    return interval
