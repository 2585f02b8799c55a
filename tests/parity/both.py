"""Both libraries on one checkpoint: the same bits, the same logits, whole and step by step; and ways to damage a directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from safetensors.torch import load_file, save_file

from edge0_train.base import load_base
from tests.tiny_models import tiny_tier

MLX_DTYPES = {torch.float32: mx.float32, torch.bfloat16: mx.bfloat16, torch.float16: mx.float16}
LOGITS_TOLERANCE = 1e-5  # relative L2; measured 3e-6 to 6e-6


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def to_mlx(tensor: torch.Tensor) -> mx.array:
    return mx.array(raw(tensor).numpy()).view(MLX_DTYPES[tensor.dtype]).reshape(tensor.shape)


def same_bits(ours: torch.Tensor, theirs: mx.array) -> bool:
    return tuple(ours.shape) == theirs.shape and np.array_equal(
        raw(ours).numpy(), np.array(theirs.reshape(-1).view(mx.uint8))
    )


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of all shards."""
    return {name: tensor for file in directory.glob("model*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_checkpoint(ours: Path, theirs: Path) -> None:
    """Names, dtypes, shapes and bytes of all tensors, and the quantization blocks."""
    a, b = tensors_of(ours), tensors_of(theirs)
    assert a.keys() == b.keys()
    for name, expected in b.items():
        assert (a[name].dtype, a[name].shape) == (expected.dtype, expected.shape), name
        assert torch.equal(raw(a[name]), raw(expected)), name
    configs = [json.loads((path / "config.json").read_text()) for path in (ours, theirs)]
    for field in ("quantization", "quantization_config"):
        assert configs[0][field] == configs[1][field]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def some_ids(tokens: int = 70) -> torch.Tensor:
    return torch.randint(0, 384, (2, tokens), generator=torch.Generator().manual_seed(7))


def mlx_float32(directory: Path) -> Any:
    model, _ = load_model(directory)
    model.set_dtype(mx.float32)
    return model


def as_torch(array: mx.array) -> torch.Tensor:
    return torch.from_numpy(np.array(array))


@torch.no_grad()
def torch_steps(model: Any, ids: torch.Tensor, prefill: int) -> torch.Tensor:
    out = model(ids[:, :prefill], use_cache=True)
    logits = [out.logits]
    for t in range(prefill, ids.shape[1]):
        out = model(ids[:, t : t + 1], cache=out.cache, use_cache=True)
        logits.append(out.logits)
    return torch.cat(logits, dim=1)


def mlx_steps(model: Any, ids: torch.Tensor, prefill: int) -> torch.Tensor:
    cache = make_prompt_cache(model)
    logits = [as_torch(model(mx.array(ids[:, :prefill].numpy()), cache=cache))]
    for t in range(prefill, ids.shape[1]):
        logits.append(as_torch(model(mx.array(ids[:, t : t + 1].numpy()), cache=cache)))
    return torch.cat(logits, dim=1)


@torch.no_grad()
def logits_differ(directory: Path, tier: Any = None) -> list[str]:
    """The comparisons that fail: the whole sequence, and 20 tokens then single steps with a cache."""
    ids = some_ids()
    ours, _ = load_base(directory, tier or tiny_tier())
    theirs = mlx_float32(directory)
    whole = as_torch(theirs(mx.array(ids.numpy())))
    found = {
        "whole": relative(ours(ids).logits, whole),
        "torch steps": relative(torch_steps(ours, ids, 20), whole),
        "mlx steps": relative(mlx_steps(theirs, ids, 20), whole),
    }
    return [f"{name}: {value:.1e}" for name, value in found.items() if not value <= LOGITS_TOLERANCE]


def edit_config(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))


def edited(directory: Path, out: Path, tensors: Callable | None = None, config: Callable | None = None) -> Path:
    """A copy of a directory with its tensors or its config.json changed in place."""
    shutil.copytree(directory, out)
    if tensors is not None:
        values = load_file(out / "model.safetensors")
        tensors(values)
        save_file({name: value.contiguous() for name, value in values.items()}, out / "model.safetensors")
    if config is not None:
        edit_config(out, config)
    return out


def put(name: str, value: Callable[[dict], torch.Tensor]) -> Callable[[dict], None]:
    return lambda tensors: tensors.__setitem__(name, value(tensors))
