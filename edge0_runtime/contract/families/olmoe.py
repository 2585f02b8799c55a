"""OLMoE: transformers' OlmoeForCausalLM, mlx-lm's olmoe."""

from edge0_runtime.contract.families._blocks import COMMON, PLAIN, attention, flat_family, flat_table, keys_and_values
from edge0_runtime.contract.links import Config


def _head_dim(config: Config) -> int:
    return int(config["hidden_size"] // config["num_attention_heads"])


FAMILY = flat_family(
    "olmoe",
    "OlmoeForCausalLM",
    table=flat_table(gate="int4"),
    agreed=PLAIN
    | {
        "attention_bias": False,
        "clip_qkv": None,  # mlx-lm does not clip
        "head_dim": _head_dim,
    },
    required=(*COMMON, "num_key_value_heads", "num_experts", "intermediate_size"),
    expert_width="intermediate_size",
    aliases={"num_experts": "num_local_experts"},
    renormalises="norm_topk_prob",
    layer_modules=lambda arch, layer: attention(arch, _head_dim(arch)),
    kept=lambda arch, layer: keys_and_values(arch, _head_dim(arch)),
)
