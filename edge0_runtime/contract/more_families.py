"""Families that no public tier uses: what "bring your own MoE" knows (docs/parity.md 8)."""

from __future__ import annotations

from edge0_runtime.contract.family import Architecture, Family

Modules = dict[str, tuple[int, int]]


def _mlp(path: str, hidden: int, width: int) -> Modules:
    return {
        f"{path}.gate_proj": (hidden, width),
        f"{path}.up_proj": (hidden, width),
        f"{path}.down_proj": (width, hidden),
    }


def _attention(arch: Architecture, head_dim: int, *, gated: bool = False) -> Modules:
    """Grouped-query attention; a gated one has per head [query ; output gate] in q_proj."""
    hidden = arch["hidden_size"]
    queries, keys = arch["num_attention_heads"] * head_dim, arch["num_key_value_heads"] * head_dim
    return {
        "self_attn.q_proj": (hidden, (1 + gated) * queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
    }


def _qwen3_next(arch: Architecture, layer: int) -> Modules:
    hidden = arch["hidden_size"]
    shared = _mlp("mlp.shared_expert", hidden, arch["shared_expert_intermediate_size"])
    if (layer + 1) % arch["full_attention_interval"] == 0:
        return _attention(arch, arch["head_dim"], gated=True) | shared
    keys = arch["linear_num_key_heads"] * arch["linear_key_head_dim"]
    values = arch["linear_num_value_heads"] * arch["linear_value_head_dim"]
    return {
        "linear_attn.in_proj_qkvz": (hidden, 2 * keys + 2 * values),
        "linear_attn.in_proj_ba": (hidden, 2 * arch["linear_num_value_heads"]),
        "linear_attn.out_proj": (values, hidden),
    } | shared


def _dense_or_shared(arch: Architecture, layer: int) -> Modules:
    """A dense layer's MLP, or the shared experts of a MoE layer."""
    if layer < arch["first_k_dense_replace"]:
        return _mlp("mlp", arch["hidden_size"], arch["intermediate_size"])
    return _mlp("mlp.shared_experts", arch["hidden_size"], arch["moe_intermediate_size"] * arch["n_shared_experts"])


def _deepseek_v3(arch: Architecture, layer: int) -> Modules:
    hidden, heads, rank = arch["hidden_size"], arch["num_attention_heads"], arch.get("q_lora_rank")
    queries, latent = heads * (arch["qk_nope_head_dim"] + arch["qk_rope_head_dim"]), arch["kv_lora_rank"]
    low_rank = {"self_attn.q_proj": (hidden, queries)}
    if rank is not None:
        low_rank = {"self_attn.q_a_proj": (hidden, rank), "self_attn.q_b_proj": (rank, queries)}
    return {
        **low_rank,
        "self_attn.kv_a_proj_with_mqa": (hidden, latent + arch["qk_rope_head_dim"]),
        "self_attn.kv_b_proj": (latent, heads * (arch["qk_nope_head_dim"] + arch["v_head_dim"])),
        "self_attn.o_proj": (heads * arch["v_head_dim"], hidden),
    } | _dense_or_shared(arch, layer)


_COMMON = ("num_hidden_layers", "hidden_size", "vocab_size", "num_experts_per_tok", "num_attention_heads")
_GROUPED = ("n_routed_experts", "moe_intermediate_size", "n_shared_experts", "intermediate_size")


def _family(name: str, **facts: object) -> Family:
    return Family(
        name=name,
        layer_prefix="model.layers.{n}",
        embedding="model.embed_tokens",
        experts="mlp.switch_mlp",
        router="mlp.gate",
        **facts,  # type: ignore[arg-type]
    )


MORE_FAMILIES = {
    "qwen3_moe": _family(
        "qwen3_moe",
        renormalises="norm_topk_prob",
        required=(*_COMMON, "num_key_value_heads", "head_dim", "num_experts", "moe_intermediate_size"),
        aliases={"num_experts": "num_local_experts"},
        layer_modules=lambda arch, layer: _attention(arch, arch["head_dim"]),
    ),
    "qwen3_next": _family(
        "qwen3_next",
        renormalises="norm_topk_prob",
        required=(
            *_COMMON, "num_key_value_heads", "head_dim", "num_experts", "moe_intermediate_size",
            "shared_expert_intermediate_size", "full_attention_interval", "linear_num_key_heads", "linear_key_head_dim",
            "linear_num_value_heads", "linear_value_head_dim", "linear_conv_kernel_dim",
        ),
        layer_modules=_qwen3_next,
    ),
    "olmoe": _family(
        "olmoe",
        renormalises="norm_topk_prob",
        required=(*_COMMON, "num_key_value_heads", "num_experts", "intermediate_size"),
        aliases={"num_experts": "num_local_experts"},
        expert_width="intermediate_size",
        layer_modules=lambda arch, layer: _attention(arch, arch["hidden_size"] // arch["num_attention_heads"]),
    ),
    "deepseek_v3": _family(
        "deepseek_v3",
        required=(*_COMMON, *_GROUPED, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        from_zero=("first_k_dense_replace",),
        optional=("q_lora_rank",),
        num_experts="n_routed_experts",
        expert_bias="e_score_correction_bias",
        spared=("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
        layer_modules=_deepseek_v3,
        is_moe=lambda arch, layer: layer >= arch["first_k_dense_replace"],
    ),
    "glm4_moe": _family(
        "glm4_moe",
        required=(*_COMMON, *_GROUPED, "num_key_value_heads", "head_dim"),
        from_zero=("first_k_dense_replace",),
        num_experts="n_routed_experts",
        expert_bias="e_score_correction_bias",
        layer_modules=lambda arch, layer: _attention(arch, arch["head_dim"]) | _dense_or_shared(arch, layer),
        is_moe=lambda arch, layer: layer >= arch["first_k_dense_replace"],
    ),
}  # fmt: skip
