"""The recovery LoRA on exactly the tier's targets, through PEFT, under the artifact's names (docs/method.md 1.6)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import Tier
from edge0_train.base.names import transformers_module

ADAPTER = "default"


def add_lora(model: nn.Module, tier: Tier) -> nn.Module:
    """Put an untrained LoRA (B = 0) on every target of the tier; the factors are float32 and trainable.

    Raises Edge0Error when the modules that PEFT matched are not exactly the tier's.
    """
    wanted = {transformers_module(tier.family, path) for path in tier.lora_modules()}
    # Into the layers, not into the model: of a transformers model PEFT takes every `gate_proj` for one of routed experts.
    below = tier.layout.hf_layer_prefix.removesuffix("{n}")
    targets = sorted(name.removeprefix(below) for name in wanted)
    config = LoraConfig(r=tier.lora.r, lora_alpha=tier.lora.alpha, target_modules=targets, bias="none")
    inject_adapter_in_model(config, model.get_submodule(below.rstrip(".")), adapter_name=ADAPTER)
    matched = {name for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    if matched != wanted:
        raise Edge0Error(
            f"tier.lora.targets: PEFT matched {len(matched)} modules, the tier names {len(wanted)};"
            f" missing {sorted(wanted - matched)[:5]}, extra {sorted(matched - wanted)[:5]}"
        )
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    return model


def _factors(model: nn.Module, tier: Tier) -> Iterator[tuple[str, nn.Parameter]]:
    """(artifact key, parameter) of every factor, in the tier's order."""
    for path in tier.lora_modules():
        layer: Any = model.get_submodule(transformers_module(tier.family, path))
        yield f"{path}.lora_A", layer.lora_A[ADAPTER].weight
        yield f"{path}.lora_B", layer.lora_B[ADAPTER].weight


def lora_tensors(model: nn.Module, tier: Tier) -> dict[str, np.ndarray]:
    """{artifact key: float32 array} of the model's LoRA: A is [r, in], B is [out, r]."""
    return {key: parameter.detach().cpu().float().numpy() for key, parameter in _factors(model, tier)}


@torch.no_grad()
def load_lora(model: nn.Module, tier: Tier, tensors: Mapping[str, np.ndarray]) -> None:
    """Take the values of a LoRA artifact (already checked against the tier by the contract's reader)."""
    for key, parameter in _factors(model, tier):
        parameter.copy_(torch.from_numpy(np.asarray(tensors[key], np.float32)))


@contextmanager
def lora_disabled(model: nn.Module) -> Iterator[None]:
    """Run the bare base: every LoRA layer is switched off inside the block."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    flags = [parameter.requires_grad for layer in layers for parameter in layer.parameters()]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        # PEFT switches requires_grad along with the adapter: put back what was there.
        restored = iter(flags)
        for layer in layers:
            for parameter in layer.parameters():
                parameter.requires_grad_(next(restored))
