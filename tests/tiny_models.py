"""Tiny random models of each family, as plain functions: the shared fixtures of the tests.

A random model says nothing about quality (rounding its weights already changes its logits by 10 %), but with
equal weights on both sides it shows every difference between two implementations.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from edge0_runtime.contract.tier import Tier

REPOSITORY = Path(__file__).parents[1]
TEACHER = REPOSITORY / "edge0_train/assets/nano-teacher"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")

ARCHITECTURE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "vocab_size": 384,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "full_attention_interval": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 32,
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}

ARCHITECTURE_35B = ARCHITECTURE | {
    "num_hidden_layers": 40,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""The 35b's layers, experts and mixers at a tiny width: 130 M parameters."""


def tiny_tier(**overrides: Any) -> Tier:
    """A tier for `tiny_qwen3_5_moe`: overrides are fields of the tier, or of its architecture."""
    data: dict[str, Any] = {
        "name": "tiny",
        "model": "tiny-random",
        "family": "qwen3_5_moe",
        "k": 2,
        "router": {"kind": "softmax_topk"},
        "feature_topk": "executed",
        "first_token": "gate",
        "owners": [0, 1, 2],
        "consumers": [1, 2, 3],
        "head_width": 32,
        "lora": {"r": 4, "alpha": 8, "targets": ["linear_attn.in_proj_qkv", "self_attn.q_proj"]},
        "architecture": ARCHITECTURE,
    }
    numbers = {key: value for key, value in overrides.items() if key in ARCHITECTURE}
    fields = {key: value for key, value in overrides.items() if key not in ARCHITECTURE}
    return Tier.from_dict(data | fields | {"architecture": ARCHITECTURE | numbers})


def tiny_qwen3_5_moe(directory: Path | str, seed: int = 0, branch_gain: float = 1.0, **overrides: Any) -> Path:
    """Write a random Qwen3.5-MoE and a small chat tokenizer: a transformers directory that mlx-lm reads too.

    Nested config, fused experts below `model.language_model.`, lm_head if not tied. Norms, A_log and all
    other vectors are random too, so that a lost +1 or a swapped axis shows.

    Args:
        seed: of the weights; the global random state is left as it was.
        branch_gain: on what mixers and experts add to the residual stream; smaller where many layers would amplify float error.
        overrides: fields of the text config; `dtype="float32"` stores float32 instead of bfloat16.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    text: dict[str, Any] = {
        "model_type": "qwen3_5_moe_text",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {
            "mrope_section": [2, 1, 1],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000.0,
            "rope_type": "default",
        },
        "eos_token_id": 2,
        "pad_token_id": 0,
        **ARCHITECTURE,
        **overrides,
    }
    interval, layers = text["full_attention_interval"], text["num_hidden_layers"]
    text["layer_types"] = ["linear_attention" if (n + 1) % interval else "full_attention" for n in range(layers)]
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")

    dtype = getattr(torch, text["dtype"])
    fields = {key: value for key, value in text.items() if key not in ("model_type", "dtype")}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(text["model_type"], **fields))
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, parameter in model.named_parameters():  # tied ones once
        values = torch.randn(parameter.shape, generator=random)
        if name.endswith(("linear_attn.norm.weight", "dt_bias")):
            values = 1 + 0.1 * values
        elif name.endswith(("norm.weight", "A_log")):
            values = 0.3 * values
        elif parameter.ndim > 1:
            gain = branch_gain if name.removesuffix(".weight").endswith(("o_proj", "out_proj", "down_proj")) else 1.0
            values = gain * values / parameter.shape[-1] ** 0.5
        disk_name = name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
        tensors[disk_name] = values.to(dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for name in TOKENIZER_FILES:
        shutil.copyfile(TEACHER / name, directory / name)
    return directory


def random_qwen3_5_moe(tier: Tier, seed: int = 0) -> torch.nn.Module:
    """A frozen float32 model of the tier's architecture, in memory only; routing and text depend on every token."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_moe_text", **dict(tier.architecture)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if name.endswith(("linear_attn.norm.weight", "dt_bias")):
                parameter.copy_(1 + 0.1 * noise)
            elif parameter.ndim > 1:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5 * (3.0 if "mlp.gate." in name else 1.0))
            else:
                parameter.copy_(0.3 * noise)
    return model.requires_grad_(False).eval()
