"""The recovery LoRA, unmerged, in mlx-lm's LoRALinear: y = W_int4 x + (alpha/r) B A x (docs/method.md 1.6).

Latent attention's `kv_b_proj` is no module of mlx-lm's network: it is absorbed into `embed_q` and `unembed_out`, which hold
its rows by head, and its LoRA is served on both (`LoRAMultiLinear`).
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.links import ABSORBED, ABSORBED_HALVES
from edge0_runtime.contract.tier import Lora
from edge0_runtime.libraries import LoRALinear


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
    offenders += [problem for path in paths for problem in _problems(path, modules, tensors, spec.r)]
    if offenders or not paths:
        what = "; ".join(offenders) or "the file has no tensors"
        raise Edge0Error(f"lora: {what}; export the LoRA for this base again")
    wrapped: list[tuple[str, nn.Module]] = []
    for path in paths:
        a, b = (mx.array(tensors[f"{path}.lora_{half}"].T).astype(dtype) for half in ("A", "B"))
        if path in modules:
            lora = LoRALinear.from_base(modules[path], r=spec.r, dropout=0.0, scale=spec.alpha / spec.r)
            lora.lora_a, lora.lora_b = a, b
            wrapped.append((path, lora))
        else:
            wrapped += _absorbed(path, modules, a, b, spec.alpha / spec.r)
    for _, lora in wrapped:
        lora.eval()
    model.update_modules(tree_unflatten(wrapped))
    return len(paths)


class LoRAMultiLinear(nn.Module):
    """mlx-lm's MultiLinear, one matrix a head, plus scale * x a b.

    x is [B, heads or 1, T, in], a [heads or 1, in, r], b [heads or 1, r, out]; with `transpose=False` it goes the other
    way, from out to in.
    """

    def __init__(self, linear: nn.Module, a: mx.array, b: mx.array, scale: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.linear = linear
        self.lora_a, self.lora_b = a, b
        self._scale = scale

    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        """x W^T, or x W where not `transpose`, plus the LoRA the same way; in the dtype of x."""
        first, second = (self.lora_a, self.lora_b) if transpose else (self.lora_b.mT, self.lora_a.mT)
        base: mx.array = self.linear(x, transpose)
        return base + (self._scale * (x @ first @ second)).astype(x.dtype)


def _absorbed(
    path: str, modules: Mapping[str, nn.Module], a_LR: mx.array, b_RO: mx.array, scale: float
) -> list[tuple[str, nn.Module]]:
    """kv_b_proj's LoRA on its two halves; O are the rows [head][nope, then value], L the latent."""
    embed_q, unembed_out = _halves(path, modules)
    (heads, nope), (_, values) = _heads_and_width(embed_q), unembed_out.weight.shape[:2]
    b_HRW = mx.unflatten(b_RO, 1, (heads, nope + values)).swapaxes(0, 1)
    key_HRN, value_HRV = mx.split(b_HRW, [nope], axis=-1)
    # The first half goes from nope to the latent, the second from the latent to the values.
    loras = (
        LoRAMultiLinear(embed_q, key_HRN.mT, a_LR.T[None], scale),
        LoRAMultiLinear(unembed_out, a_LR[None], value_HRV, scale),
    )
    parent = path.rpartition(".")[0]
    return [(f"{parent}.{half}", lora) for half, lora in zip(ABSORBED_HALVES, loras, strict=True)]


def _halves(path: str, modules: Mapping[str, nn.Module]) -> tuple[nn.Module, ...]:
    """(embed_q, unembed_out) of an absorbed kv_b_proj; () if `path` is none."""
    parent, _, name = path.rpartition(".")
    found = [modules[at] for half in ABSORBED_HALVES if (at := f"{parent}.{half}") in modules]
    return tuple(found) if name == ABSORBED and len(found) == 2 else ()


def _heads_and_width(module: nn.Module) -> tuple[int, int]:
    """Heads of a MultiLinear, and its input width."""
    width = module.weight.shape[-1]
    return module.weight.shape[0], width * 32 // module.bits if "scales" in module else width


def _features(path: str, modules: Mapping[str, nn.Module]) -> tuple[int, int] | None:
    """(in, out) of the linear module `path`, absorbed or not; None if it is none."""
    module = modules.get(path)
    if isinstance(module, nn.QuantizedLinear):
        return module.weight.shape[1] * 32 // module.bits, module.weight.shape[0]
    if isinstance(module, nn.Linear):
        return module.weight.shape[1], module.weight.shape[0]
    if halves := _halves(path, modules):
        heads, nope = _heads_and_width(halves[0])
        return halves[0].weight.shape[1], heads * (nope + halves[1].weight.shape[1])
    return None


def _problems(path: str, modules: Mapping[str, nn.Module], tensors: Mapping[str, np.ndarray], r: int) -> list[str]:
    features = _features(path, modules)
    if features is None:
        return [f"{path} is {'not a linear module' if path in modules else 'no module'} of the model"]
    problems = []
    for half, wanted in (("lora_A", (r, features[0])), ("lora_B", (features[1], r))):
        key = f"{path}.{half}"
        if key not in tensors:
            problems.append(f"{key} is missing")
        elif tensors[key].shape != wanted:
            problems.append(f"{key} has shape {list(tensors[key].shape)}, the model wants {list(wanted)}")
    return problems
