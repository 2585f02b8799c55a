"""config.json of public models, as far as a tier depends on it: the fields that they have, under the names that they use."""

from __future__ import annotations

from typing import Any

_ANY: dict[str, Any] = {
    "hidden_act": "silu",
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

REAL: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": _ANY | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1,
        "eos_token_id": 151645, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": None,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "Qwen3-Next-80B-A3B-Instruct": _ANY | {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "attention_bias": False, "decoder_sparse_step": 1,
        "eos_token_id": 151645, "full_attention_interval": 4, "head_dim": 256, "hidden_size": 2048, "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [], "moe_intermediate_size": 512,
        "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48,
        "num_key_value_heads": 2, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "rope_theta": 1e7,
        "shared_expert_intermediate_size": 512, "use_sliding_window": False, "vocab_size": 151936,
    },
    "OLMoE-1B-7B-0924": _ANY | {
        "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "attention_bias": False, "clip_qkv": None,
        "eos_token_id": 50279, "pad_token_id": 1, "hidden_size": 2048, "intermediate_size": 1024, "max_position_embeddings": 4096,
        "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
        "num_key_value_heads": 16, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": 50304,
    },
    "Moonlight-16B-A3B": _ANY | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False, "bos_token_id": 163584,
        "eos_token_id": 163585, "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 11264, "kv_lora_rank": 512,
        "max_position_embeddings": 8192, "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 2, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts_per_tok": 6,
        "num_hidden_layers": 27, "num_key_value_heads": 16, "num_nextn_predict_layers": 0, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446, "scoring_func": "sigmoid", "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128,
        "vocab_size": 163840,
    },
    "GLM-4.5-Air": _ANY | {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True, "pad_token_id": 151329,
        "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_size": 4096, "partial_rotary_factor": 0.5,
        "intermediate_size": 10944, "max_position_embeddings": 131072, "moe_intermediate_size": 1408, "norm_topk_prob": True,
        "num_attention_heads": 96, "n_group": 1, "topk_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
        "routed_scaling_factor": 1.0, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "num_hidden_layers": 46,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_nextn_predict_layers": 1, "use_qk_norm": False,
        "vocab_size": 151552,
    },
}  # fmt: skip
PARAMETERS = {
    "Qwen3-30B-A3B": 30.53e9, "Qwen3-Next-80B-A3B-Instruct": 79.67e9, "OLMoE-1B-7B-0924": 6.92e9, "Moonlight-16B-A3B": 15.96e9,
    "GLM-4.5-Air": 106.9e9,
}  # fmt: skip
"""As their cards say, without multi-token prediction."""
