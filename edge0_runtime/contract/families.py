"""The supported families; those of the public tiers here, others in `more_families.py`.

Shapes were checked against the published files to the byte; names are those of mlx-lm's model classes.
"""

from __future__ import annotations

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.family import PROJECTIONS, QUANTISED_PARTS, Architecture, Family
from edge0_runtime.contract.more_families import MORE_FAMILIES

__all__ = ["PROJECTIONS", "QUANTISED_PARTS", "Architecture", "Family", "family"]


def _qwen3_5_modules(arch: Architecture, layer: int) -> dict[str, tuple[int, int]]:
    hidden = arch["hidden_size"]
    if (layer + 1) % arch["full_attention_interval"] == 0:
        queries = arch["num_attention_heads"] * arch["head_dim"]
        keys = arch["num_key_value_heads"] * arch["head_dim"]
        mixer = {
            "self_attn.q_proj": (hidden, 2 * queries),  # per head: [query ; output gate]
            "self_attn.k_proj": (hidden, keys),
            "self_attn.v_proj": (hidden, keys),
            "self_attn.o_proj": (queries, hidden),
        }
    else:
        keys = arch["linear_num_key_heads"] * arch["linear_key_head_dim"]
        values = arch["linear_num_value_heads"] * arch["linear_value_head_dim"]
        mixer = {
            "linear_attn.in_proj_qkv": (hidden, 2 * keys + values),
            "linear_attn.in_proj_z": (hidden, values),
            "linear_attn.in_proj_a": (hidden, arch["linear_num_value_heads"]),
            "linear_attn.in_proj_b": (hidden, arch["linear_num_value_heads"]),
            "linear_attn.out_proj": (values, hidden),
        }
    shared = arch["shared_expert_intermediate_size"]
    return mixer | {
        "mlp.shared_expert.gate_proj": (hidden, shared),
        "mlp.shared_expert.up_proj": (hidden, shared),
        "mlp.shared_expert.down_proj": (shared, hidden),
    }


def _bailing_moe_v3_modules(arch: Architecture, layer: int) -> dict[str, tuple[int, int]]:
    hidden, heads = arch["hidden_size"], arch["num_attention_heads"]
    if (layer + 1) % arch["layer_group_size"] == 0:  # multi-head latent attention
        queries, rank = heads * (arch["qk_nope_head_dim"] + arch["qk_rope_head_dim"]), arch.get("q_lora_rank")
        values, latent = heads * arch["v_head_dim"], arch["kv_lora_rank"]
        modules = {
            **(
                {"q_proj": (hidden, queries)}
                if rank is None
                else {"q_a_proj": (hidden, rank), "q_b_proj": (rank, queries)}
            ),
            "kv_a_proj_with_mqa": (hidden, latent + arch["qk_rope_head_dim"]),
            "kv_b_proj": (latent, heads * arch["qk_nope_head_dim"] + values),
            "g_proj": (hidden, heads),
            "dense": (values, hidden),
        }
    else:  # Kimi delta attention
        width = heads * arch["head_dim"]
        modules = {f"{name}_proj": (hidden, width) for name in ("q", "k", "v", "f", "g")}
        modules |= {"b_proj": (hidden, heads), "o_proj": (width, hidden)}
    if layer < arch["first_k_dense_replace"]:
        mlp, width = "mlp", arch["intermediate_size"]
    else:
        mlp, width = "mlp.shared_experts", arch["moe_intermediate_size"] * arch["num_shared_experts"]
    return {f"attention.{name}": shape for name, shape in modules.items()} | {
        f"{mlp}.gate_proj": (hidden, width),
        f"{mlp}.up_proj": (hidden, width),
        f"{mlp}.down_proj": (width, hidden),
    }


_FAMILIES = {
    "qwen3_5_moe": Family(
        name="qwen3_5_moe",
        layer_prefix="language_model.model.layers.{n}",
        embedding="language_model.model.embed_tokens",
        experts="mlp.switch_mlp",
        router="mlp.gate",
        required=(
            "num_hidden_layers", "hidden_size", "vocab_size", "num_experts", "num_experts_per_tok",
            "moe_intermediate_size", "shared_expert_intermediate_size", "full_attention_interval",
            "num_attention_heads", "num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_key_head_dim",
            "linear_num_value_heads", "linear_value_head_dim", "linear_conv_kernel_dim",
        ),
        layer_modules=_qwen3_5_modules,
    ),
    "bailing_moe_v3": Family(
        name="bailing_moe_v3",
        layer_prefix="model.layers.{n}",
        embedding="model.word_embeddings",
        experts="mlp.switch_mlp",
        other_experts=("mlp.experts",),
        ignored=("mlp.pregate.",),  # an old copy of prerouter heads
        router="mlp.gate",
        expert_bias="expert_bias",
        required=(
            "num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size", "num_experts",
            "num_experts_per_tok", "moe_intermediate_size", "num_shared_experts", "layer_group_size",
            "num_attention_heads", "head_dim", "short_conv_kernel_size", "kv_lora_rank", "qk_nope_head_dim",
            "qk_rope_head_dim", "v_head_dim",
        ),
        from_zero=("first_k_dense_replace",),
        optional=("q_lora_rank",),
        aliases={
            "head_dim": "linear_head_dim",  # transformers saves the rotary width as head_dim
            "num_experts_per_tok": "num_experts_per_token",
            "n_group": "num_expert_group",
            "max_position_embeddings": "model_max_length",
        },
        spared=(
            "attention.q_a_proj", "attention.kv_a_proj_with_mqa",
            *(f"mlp.shared_experts.{projection}" for projection in PROJECTIONS),
        ),
        public_tier="8b",
        layer_modules=_bailing_moe_v3_modules,
        is_moe=lambda arch, layer: layer >= arch["first_k_dense_replace"],
    ),
    **MORE_FAMILIES,
}  # fmt: skip


def family(name: str) -> Family:
    """The family called `name`. Raises Edge0Error naming the supported ones."""
    if name not in _FAMILIES:
        raise Edge0Error(f"family: {name!r} is not supported; choose one of {', '.join(sorted(_FAMILIES))}")
    return _FAMILIES[name]
