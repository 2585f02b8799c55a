"""Ling 3: transformers' BailingHybridForCausalLM, mlx-lm's bailing_moe_v3.

Most layers are KDA (Kimi delta attention, one short convolution each for queries, keys and values), every
`layer_group_size`-th is MLA (latent attention). Checkpoints hold two things in two forms: kv_b_proj, as the linear module
that it is or absorbed as mlx-lm's class has it; and the experts, below `experts` in the published file and below
`switch_mlp` after mlx-lm's convert.
"""

from __future__ import annotations

from typing import Any

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.families import family
from edge0_train.base.families.table import Config, FamilyNames, Link


def _is_mla(config: Config, layer: int) -> bool:
    return (layer + 1) % config["layer_group_size"] == 0


def _is_kda(config: Config, layer: int) -> bool:
    return not _is_mla(config, layer)


def _table() -> tuple[Link, ...]:
    layer = "model.layers.{n}."
    hf, mlx = f"{layer}self_attn.", f"{layer}attention."

    def linear(name: str, mlx_name: str = "", **facts: Any) -> Link:
        return Link(f"{hf}{name}.weight", (f"{mlx}{mlx_name or name}.weight",), linear=True, **facts)

    def mlp(path: str) -> tuple[Link, ...]:
        names = (f"{layer}{path}.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj"))
        return tuple(Link(name, (name,), stored="int4", linear=True) for name in names)

    def experts(hf_name: str, *projections: str) -> tuple[Link, ...]:
        disk = tuple(f"{layer}mlp.experts.{{e}}.{name}.weight" for name in projections)
        forms = (
            tuple(f"{layer}mlp.{below}.{name}.weight" for name in projections) for below in ("switch_mlp", "experts")
        )
        return tuple(Link(f"{layer}mlp.experts.{hf_name}", form, stored="int4", disk=disk) for form in forms)

    def same(path: str, mlx_path: str = "", **facts: Any) -> Link:
        return Link(path, (mlx_path or path,), **facts)

    convolutions = tuple(f"{mlx}{name}_conv1d.weight" for name in ("q", "k", "v"))
    on_disk = tuple(f"{hf}{name}_conv1d.weight" for name in ("q", "k", "v"))
    kv_b = f"{hf}kv_b_proj.weight"
    return (
        same("model.embed_tokens.weight", "model.word_embeddings.weight"),
        same("model.norm.weight"),
        same("lm_head.weight"),
        *(same(f"{layer}{name}.weight") for name in ("input_layernorm", "post_attention_layernorm")),
        # KDA
        *(linear(f"{name}_proj", stored="int4", when=_is_kda) for name in ("q", "k", "v", "g", "o")),
        linear("forget_gate.f_proj", "f_proj", stored="int4"),
        linear("b_proj"),
        same(f"{hf}forget_gate.A_log", f"{mlx}A_log", float32=True),
        same(f"{hf}forget_gate.dt_bias", f"{mlx}dt_bias", float32=True),
        same(f"{hf}o_norm.weight", f"{mlx}o_norm.weight"),
        Link(f"{hf}conv1d.weight", convolutions, "conv_axes", float32=True, disk=on_disk),
        Link(f"{hf}conv1d.weight", convolutions, "channels", float32=True),  # mlx-lm reads both
        # MLA
        *(linear(name, when=_is_mla) for name in ("q_proj", "g_proj")),
        *(linear(name) for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")),
        *(same(f"{hf}{name}.weight", f"{mlx}{name}.weight") for name in ("q_a_layernorm", "kv_a_layernorm")),
        linear("o_proj", "dense", stored="int4", when=_is_mla),
        Link(kv_b, (f"{mlx}embed_q.weight", f"{mlx}unembed_out.weight"), "absorbed"),
        linear("kv_b_proj"),
        # MoE
        same(f"{layer}mlp.gate.weight", float32=True),
        same(f"{layer}mlp.gate.e_score_correction_bias", f"{layer}mlp.gate.expert_bias", float32=True),
        *experts("gate_up_proj", "gate_proj", "up_proj"),
        *experts("down_proj", "down_proj"),
        *mlp("mlp.shared_experts"),
        *mlp("mlp"),  # dense layers
    )


def _mlx_config(config: Config) -> dict[str, Any]:
    """The fields under mlx-lm's names: what it does not find it fills, silently, with those of the 8b."""
    aliases = family("bailing_moe_v3").aliases
    made = {key: value for key, value in config.items() if key not in ("_name_or_path", *aliases.values())}
    made |= {name: config[alias] for name, alias in aliases.items() if alias in config}
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
    for field, other, kind in (
        ("layer_types", "layer_group_size", lambda n: "full_attention" if _is_mla(made, n) else "linear_attention"),
        (
            "mlp_layer_types",
            "first_k_dense_replace",
            lambda n: "sparse" if n >= made["first_k_dense_replace"] else "dense",
        ),
    ):
        kinds = made.pop(field, [])
        if kinds != [kind(n) for n in range(len(kinds))]:
            raise Edge0Error(
                f"config.json {field}: not the layers of {other} = {made[other]}, which is all that mlx-lm knows;"
                " correct the field or choose another model"
            )
    return made


NAMES = FamilyNames(
    family="bailing_moe_v3",
    hf_model_type="bailing_hybrid",
    table=_table(),
    disk_renames=(
        (r"^model\.word_embeddings\.", "model.embed_tokens."),
        (r"\.attention\.", ".self_attn."),
        (r"\.self_attn\.(f_proj|dt_bias|A_log)", r".self_attn.forget_gate.\1"),
        (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
        (r"\.gate\.expert_bias$", ".gate.e_score_correction_bias"),
    ),
    dropped=(),
    # torch's KDA works with all pairs of a chunk's tokens, channel by channel: training nano-ling takes .7 s a step, not 2.5
    # with the default of 64.
    cpu_options={"chunk_size": 8},
    spare_layers=True,
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
)
