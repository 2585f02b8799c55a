"""The recovery LoRA, unmerged, in mlx-lm's LoRALinear: y = W_int4 x + (alpha/r) B A x (docs/method.md 1.6)."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.tuner.lora import LoRALinear

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import Lora


def apply_lora(model: nn.Module, tensors: Mapping[str, np.ndarray], spec: Lora, dtype: mx.Dtype) -> int:
    """Wrap the target modules of `model` in place.

    Args:
        model: an mlx-lm model whose module paths are those of the checkpoint.
        tensors: content of the LoRA file: `<module path>.lora_A` [r, in] and `.lora_B` [out, r].
        spec: rank and alpha. dtype: what the factors compute in.

    Returns:
        Number of wrapped modules.

    Raises:
        Edge0Error: listing every key that matches no linear module, every missing half and every wrong shape.
    """
    modules = dict(model.named_modules())
    strangers = [key for key in tensors if not key.endswith((".lora_A", ".lora_B"))]
    offenders = [f"{key} is neither a lora_A nor a lora_B" for key in strangers]
    paths = sorted({key.rsplit(".", 1)[0] for key in tensors})
    offenders += [problem for path in paths for problem in _problems(path, modules.get(path), tensors, spec.r)]
    if offenders or not paths:
        what = "; ".join(offenders) or "the file has no tensors"
        raise Edge0Error(f"lora: {what}; export the LoRA for this base again")
    wrapped = []
    for path in paths:
        lora = LoRALinear.from_base(modules[path], r=spec.r, dropout=0.0, scale=spec.alpha / spec.r)
        lora.lora_a = mx.array(tensors[f"{path}.lora_A"].T).astype(dtype)
        lora.lora_b = mx.array(tensors[f"{path}.lora_B"].T).astype(dtype)
        lora.eval()
        wrapped.append((path, lora))
    model.update_modules(tree_unflatten(wrapped))
    return len(wrapped)


def _problems(path: str, module: nn.Module | None, tensors: Mapping[str, np.ndarray], r: int) -> list[str]:
    if not isinstance(module, (nn.Linear, nn.QuantizedLinear)):
        return [f"{path} is {'no module' if module is None else 'not a linear module'} of the model"]
    out_features, in_features = module.weight.shape
    if isinstance(module, nn.QuantizedLinear):
        in_features = in_features * 32 // module.bits
    problems = []
    for half, wanted in (("lora_A", (r, in_features)), ("lora_B", (out_features, r))):
        key = f"{path}.{half}"
        if key not in tensors:
            problems.append(f"{key} is missing")
        elif tensors[key].shape != wanted:
            problems.append(f"{key} has shape {list(tensors[key].shape)}, the model wants {list(wanted)}")
    return problems
