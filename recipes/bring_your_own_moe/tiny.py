"""Tiny random models of the families with a flat config.json, saved as transformers saves them; the tests use them too.

python -m recipes.bring_your_own_moe.tiny olmoe /tmp/olmoe
"""

from __future__ import annotations

import shutil
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "vocab_size": 384,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SOFTMAX: dict[str, Any] = {"num_experts": 8, "moe_intermediate_size": 64, "head_dim": 32, "norm_topk_prob": True}
_GROUPED: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
FLAT: dict[str, dict[str, Any]] = {
    "qwen3_moe": _COMMON | _SOFTMAX,
    "qwen3_next": _COMMON
    | _SOFTMAX
    | {
        "num_hidden_layers": 4,
        "shared_expert_intermediate_size": 64,
        "linear_num_key_heads": 1,
        "linear_key_head_dim": 32,
        "linear_num_value_heads": 2,
        "linear_value_head_dim": 32,
    },
    "olmoe": _COMMON | {"num_experts": 8, "intermediate_size": 64, "norm_topk_prob": False},
    "deepseek_v3": _COMMON
    | _GROUPED
    | {
        "num_key_value_heads": 2,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    },
    "glm4_moe": _COMMON | _GROUPED | {"head_dim": 32, "attention_bias": True, "use_qk_norm": True},
}
"""The config fields of each family's tiny model."""


def tiny_flat(directory: Path | str, family: str, seed: int = 0, dtype: str = "bfloat16", **overrides: Any) -> Path:
    """Write a random model of `family` with `save_pretrained`, and nano's chat tokenizer."""
    directory = Path(directory)
    config = AutoConfig.for_model(family, **FLAT[family] | overrides)
    model = AutoModelForCausalLM.from_config(config)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=random)
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(0.1 * noise.abs())  # mlx-lm gives a dropped group 0: a biased score must stay above it
            elif "embed_tokens" in name:
                tensor.copy_(noise)  # as large as what the layers add: every token's routing is its own
            elif tensor.ndim > 1:
                tensor.copy_(noise / tensor.shape[-1] ** 0.5 * (3.0 if "mlp.gate." in name else 1.0))
            elif family == "qwen3_next" and name.endswith("norm.weight") and "linear_attn" not in name:
                tensor.copy_(0.3 * noise)  # one-centred
            elif name.endswith(("norm.weight", "dt_bias")):
                tensor.copy_(1 + 0.1 * noise)
            else:
                tensor.copy_(0.3 * noise)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    for name in TOKENIZER_FILES:
        shutil.copyfile(str(files("edge0_train") / "assets/nano-teacher" / name), directory / name)
    return directory


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in FLAT:
        sys.exit(f"give a family and a directory; families: {', '.join(FLAT)}")
    tiny_flat(sys.argv[2], sys.argv[1])
