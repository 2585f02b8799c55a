"""Ling 3: transformers' BailingHybridForCausalLM, mlx-lm's bailing_moe_v3.

Most layers are KDA (Kimi delta attention, one short convolution each for queries, keys and values), every
`layer_group_size`-th is MLA (latent attention). Checkpoints hold two things in two forms: kv_b_proj, as the linear module
that it is or absorbed as mlx-lm's class has it; and the experts, below `experts` in the published file and below
`switch_mlp` after mlx-lm's convert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.families._blocks import (
    GROUPED_ROUTER,
    LAYER,
    Modules,
    dense_or_shared,
    latents,
    same,
    sparse_after_dense,
)
from edge0_runtime.contract.family import PROJECTIONS, Architecture, Family, Fill, Kept
from edge0_runtime.contract.links import ABSORBED, ABSORBED_HALVES, Config, Link

_ALIASES = {
    "head_dim": "linear_head_dim",  # transformers saves the rotary width as head_dim
    "num_experts_per_tok": "num_experts_per_token",
    "n_group": "num_expert_group",
    "max_position_embeddings": "model_max_length",
}


def _is_mla(config: Config, layer: int) -> bool:
    return bool((layer + 1) % config["layer_group_size"] == 0)


def _is_kda(config: Config, layer: int) -> bool:
    return not _is_mla(config, layer)


def _modules(arch: Architecture, layer: int) -> Modules:
    hidden, heads = arch["hidden_size"], arch["num_attention_heads"]
    if _is_mla(arch, layer):
        queries, rank = heads * (arch["qk_nope_head_dim"] + arch["qk_rope_head_dim"]), arch.get("q_lora_rank")
        values, latent = heads * arch["v_head_dim"], arch["kv_lora_rank"]
        modules = {
            **(
                {"q_proj": (hidden, queries)}
                if rank is None
                else {"q_a_proj": (hidden, rank), "q_b_proj": (rank, queries)}
            ),
            "kv_a_proj_with_mqa": (hidden, latent + arch["qk_rope_head_dim"]),
            ABSORBED: (latent, heads * arch["qk_nope_head_dim"] + values),
            "g_proj": (hidden, heads),
            "dense": (values, hidden),
        }
    else:
        width = heads * arch["head_dim"]
        modules = {f"{name}_proj": (hidden, width) for name in ("q", "k", "v", "f", "g")}
        modules |= {"b_proj": (hidden, heads), "o_proj": (width, hidden)}
    below = {f"attention.{name}": shape for name, shape in modules.items()}
    return below | dense_or_shared(arch, layer, "num_shared_experts")


def _kept(arch: Architecture, layer: int) -> Kept:
    if _is_mla(arch, layer):
        return latents(arch)
    width = arch["num_attention_heads"] * arch["head_dim"]
    return Kept(inputs=3 * (arch["short_conv_kernel_size"] - 1) * width, state=width * arch["head_dim"])


def _table() -> tuple[Link, ...]:
    hf, mlx = f"{LAYER.hf}.self_attn.", f"{LAYER.mlx}.attention."

    def own(name: str, mlx_name: str = "", **facts: Any) -> Link:
        """A parameter of a mixer."""
        return Link(f"{hf}{name}", (f"{mlx}{mlx_name or name}",), **facts)

    def linear(name: str, mlx_name: str = "", **facts: Any) -> Link:
        return own(f"{name}.weight", f"{mlx_name or name}.weight", linear=True, **facts)

    convolutions = tuple(f"{mlx}{name}_conv1d.weight" for name in ("q", "k", "v"))
    on_disk = tuple(f"{hf}{name}_conv1d.weight" for name in ("q", "k", "v"))
    absorbed = tuple(f"{mlx}{half}.weight" for half in ABSORBED_HALVES)
    return (
        Link("model.embed_tokens.weight", ("model.word_embeddings.weight",)),
        same("model.norm.weight"),
        same("lm_head.weight"),
        *LAYER.vectors("input_layernorm.weight", "post_attention_layernorm.weight"),
        # KDA
        *(linear(f"{name}_proj", stored="int4", when=_is_kda) for name in ("q", "k", "v", "g", "o")),
        linear("forget_gate.f_proj", "f_proj", stored="int4"),
        linear("b_proj"),
        own("forget_gate.A_log", "A_log", float32=True),
        own("forget_gate.dt_bias", "dt_bias", float32=True),
        own("o_norm.weight"),
        Link(f"{hf}conv1d.weight", convolutions, "conv_axes", float32=True, disk=on_disk),
        Link(f"{hf}conv1d.weight", convolutions, "channels", float32=True),  # mlx-lm reads both
        # MLA
        *(linear(name, when=_is_mla) for name in ("q_proj", "g_proj")),
        *(linear(name) for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")),
        *(own(f"{name}.weight") for name in ("q_a_layernorm", "kv_a_layernorm")),
        linear("o_proj", "dense", stored="int4", when=_is_mla),
        Link(f"{hf}{ABSORBED}.weight", absorbed, "absorbed"),
        linear(ABSORBED, published=True),
        # MoE
        *LAYER.vectors("mlp.gate.weight", float32=True),
        Link(f"{LAYER.hf}.mlp.gate.e_score_correction_bias", (f"{LAYER.mlx}.mlp.gate.expert_bias",), float32=True),
        *LAYER.experts("mlp.switch_mlp"),
        *LAYER.experts("mlp.experts", published=True),
        *LAYER.mlp("mlp.shared_experts"),
        *LAYER.mlp("mlp"),  # dense layers
    )


def _mlx_config(config: Config, fill: Fill) -> dict[str, Any]:
    """The fields under mlx-lm's names: what it does not find it fills, silently, with those of the 8b."""
    made = {key: value for key, value in config.items() if key not in ("_name_or_path", *_ALIASES.values())}
    made |= {name: config[alias] for name, alias in _ALIASES.items() if alias in config}
    made |= {"architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid"}
    for field, value in (
        ("moe_shared_expert_intermediate_size", made.get("moe_intermediate_size")),
        ("no_kda_lora", True),
        ("kda_safe_gate", True),
    ):
        made.setdefault(field, value)
    rope = made.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        made.setdefault("rope_scaling", rope)
    if "rope_theta" in rope:
        made["rope_theta"] = rope["rope_theta"]
    said_twice: tuple[tuple[str, str, Callable[[int], str]], ...] = (
        ("layer_types", "layer_group_size", lambda n: "full_attention" if _is_mla(made, n) else "linear_attention"),
        ("mlp_layer_types", "first_k_dense_replace", lambda n: "sparse" if sparse_after_dense(made, n) else "dense"),
    )
    for field, other, kind in said_twice:
        kinds = made.pop(field, [])
        if kinds != [kind(n) for n in range(len(kinds))]:
            raise Edge0Error(
                f"config.json {field}: not the layers of {other} = {made[other]}, which is all that mlx-lm knows;"
                " correct the field or choose another model"
            )
    return made


FAMILY = Family(
    name="bailing_moe_v3",
    hf_model_type="bailing_hybrid",
    layer_prefix=LAYER.mlx,
    embedding="model.word_embeddings",
    experts="mlp.switch_mlp",
    other_experts=("mlp.experts",),
    one_file=True,
    router="mlp.gate",
    expert_bias="expert_bias",
    ignored=("mlp.pregate.",),  # an old copy of prerouter heads
    hf_recurrent="self_attn",
    is_recurrent=_is_kda,
    disk_renames=(
        (r"^model\.word_embeddings\.", "model.embed_tokens."),
        (r"\.attention\.", ".self_attn."),
        (r"\.self_attn\.(f_proj|dt_bias|A_log)", r".self_attn.forget_gate.\1"),
        (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
        (r"\.gate\.expert_bias$", ".gate.e_score_correction_bias"),
    ),
    spare_layers=True,
    table=_table(),
    agreed={
        "norm_topk_prob": True,
        "moe_renormalize": True,
        "attention_bias": False,
        "tie_word_embeddings": False,  # transformers' class never ties them
        "hidden_act": "silu",
        "kda_safe_gate": True,
        "no_kda_lora": True,
        "rope_interleave": True,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,  # transformers' latent norms have no other
        "moe_shared_expert_intermediate_size": lambda config: config["moe_intermediate_size"],
        # mlx-lm takes the layers of an unfinished group for MLA, transformers for KDA.
        "num_hidden_layers": lambda config: (
            config["num_hidden_layers"] // config["layer_group_size"] * config["layer_group_size"]
        ),
    },
    mlx_config=_mlx_config,
    required=(
        "num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size", "num_experts",
        "num_experts_per_tok", "moe_intermediate_size", "num_shared_experts", "layer_group_size",
        "num_attention_heads", "head_dim", "short_conv_kernel_size", "kv_lora_rank", "qk_nope_head_dim",
        "qk_rope_head_dim", "v_head_dim",
    ),
    from_zero=("first_k_dense_replace",),
    optional=("q_lora_rank",),
    aliases=_ALIASES,
    is_moe=sparse_after_dense,
    layer_modules=_modules,
    kept=_kept,
    spared=(
        "attention.q_a_proj", "attention.kv_a_proj_with_mqa",
        *(f"mlp.shared_experts.{projection}" for projection in PROJECTIONS),
    ),
    public_tier="8b",
    **GROUPED_ROUTER,
)  # fmt: skip
