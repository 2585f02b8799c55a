"""The tiny random twins of all families, by the family's name: what a test of behaviour runs over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edge0_runtime.contract.tier import Tier
from tests import tiny_ling, tiny_models


@dataclass(frozen=True)
class Twin:
    """One family's tiny random model.

    Attributes:
        config: the text part of a config.json that transformers can build it from.
        tier: (**overrides of the tier's fields or the architecture's) -> a tier for it.
        write: (directory, seed, **overrides of the config) -> a transformers directory that mlx-lm reads too.
        random: (tier, seed) -> a frozen float32 model in memory.
        targets: LoRA targets of every kind that the family has.
    """

    config: Mapping[str, Any]
    tier: Callable[..., Tier]
    write: Callable[..., Path]
    random: Callable[..., torch.nn.Module]
    targets: tuple[str, ...]


TWINS = {
    "qwen3_5_moe": Twin(
        tiny_models.ARCHITECTURE,
        tiny_models.tiny_tier,
        tiny_models.tiny_qwen3_5_moe,
        tiny_models.random_qwen3_5_moe,
        ("linear_attn.in_proj_qkv", "linear_attn.out_proj", "self_attn.q_proj", "self_attn.o_proj",
         "mlp.shared_expert.down_proj"),
    ),
    "bailing_moe_v3": Twin(
        tiny_ling.ling_config(),
        tiny_ling.tiny_ling_tier,
        tiny_ling.tiny_ling,
        tiny_ling.random_ling,
        ("attention.q_proj", "attention.f_proj", "attention.g_proj", "attention.b_proj", "attention.o_proj",
         "attention.q_b_proj", "attention.kv_b_proj", "attention.dense", "mlp.gate_proj", "mlp.down_proj",
         "mlp.shared_experts.up_proj"),
    ),
}  # fmt: skip
