"""A LoRA added to the base's weights and quantised again (docs/method.md 1.6): what a merged model would compute with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_train.base import transformers_module
from edge0_train.base.affine import dequantize_once, quantize
from edge0_train.student import StudentPath
from edge0_train.student.lora import ADAPTER


def merged_weights(path: StudentPath, base_directory: str) -> Iterator[tuple[str, Any, torch.Tensor, torch.Tensor]]:
    """(MLX path, LoRA layer, U, M) of every target: W + delta, float32, and that as the base would hold it, int4 or bfloat16.

    As mlx-lm's fuse does, the sum is quantised from bfloat16, the dtype of the checkpoint's scales.
    """
    checkpoint = Checkpoint.open(Path(base_directory))
    quantised = checkpoint.config.get("quantization")
    if not quantised:
        raise Edge0Error(f"base.directory: {base_directory} is not quantised; merging loses nothing there")
    for name in path.tier.lora_modules():
        layer: Any = path.model.get_submodule(transformers_module(path.tier.family, name))
        how = quantised.get(name, quantised)
        delta = layer.lora_B[ADAPTER].weight @ layer.lora_A[ADAPTER].weight * layer.scaling[ADAPTER]
        unmerged = layer.base_layer.weight.float() + delta.float()
        again = unmerged.bfloat16()
        if f"{name}.scales" in checkpoint.entries:
            packed = quantize(again, how["bits"], how["group_size"])
            again = dequantize_once(*packed, how["bits"], how["group_size"], torch.float32)
        yield name, layer, unmerged, again.float()


@contextmanager
@torch.no_grad()
def merged(path: StudentPath, base_directory: str) -> Iterator[None]:
    """Inside the block the base's targets hold the merged and requantised weights (the caller switches the LoRA off)."""
    before: list[tuple[LoraLayer, nn.Module]] = []
    try:
        for _, layer, _, again in merged_weights(path, base_directory):
            before.append((layer, layer.base_layer))
            dense = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
            dense.weight = nn.Parameter(again.to(layer.base_layer.weight.dtype), requires_grad=False)
            layer.base_layer = dense  # whatever kind the base's own module is
        yield
    finally:
        for changed, module in before:
            changed.base_layer = module
