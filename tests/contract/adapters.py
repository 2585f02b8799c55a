"""What the tests of adapter files have in common: keys of nano's tensors, damage, and refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from edge0_runtime.contract import (
    BaseIdentity,
    Edge0Error,
    read_header,
    write_atomic,
)

KINDS = ("prerouter", "lora")
BASE, OTHER = "a" * 64, "d" * 64
CONFIG = {
    "rms_norm_eps": 1e-6,
    "rope_parameters.rope_theta": 1e4,
    "layer_types": ["linear_attention", "full_attention"],
}
IDENTITY = BaseIdentity(BASE, CONFIG)
A_KEY = "language_model.model.layers.0.linear_attn.in_proj_z.lora_A"
B_KEY = "language_model.model.layers.0.linear_attn.in_proj_z.lora_B"
HEAD_KEY = "layers.1.fc1.weight"


def replaced(path: Path, key: str, value: str | None) -> Path:
    """Rewrite one metadata key of an adapter; None removes it."""
    metadata = dict(read_header(path).metadata)
    metadata.pop(key, None)
    write_atomic(path, safetensors.numpy.load_file(path), metadata if value is None else metadata | {key: value})
    return path


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises(Edge0Error) as error:
        call(*args, **kwargs)
    return str(error.value)


def without_contract(path: Path, tensors, kind: str, metadata: dict[str, str]) -> Path:
    write_atomic(path, {k: v.astype(np.float16) for k, v in tensors(kind).items()}, metadata)
    return path
