"""mlx-lm's network of a checkpoint: made without reading, brought to the compute dtype, then read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear
from mlx_lm.utils import load_model

from edge0_runtime.contract.errors import Edge0Error


def load_network(directory: Path) -> nn.Module:
    """mlx-lm's model; nothing is read from the files yet."""
    try:
        network, _ = load_model(directory, lazy=True)
    except (ValueError, TypeError, KeyError) as error:
        raise Edge0Error(f"{directory}: mlx-lm can't load this checkpoint: {error}") from error
    return network


def to_float32(network: nn.Module, *, packed_too: bool) -> None:
    """Have the network compute in float32.

    Quantised matmuls take bf16 scales and biases beside float32 activations, with the same bits as result
    (docs/parity.md 0.4), at half the memory; but mlx casts them in every call, which a small model feels (10 % of
    a token's time at hidden size 64). `packed_too` casts them once. An embedding's are looked up and decide the dtype
    of all that follows, so they are cast in any case.
    """
    for module in network.modules():
        packed = isinstance(module, (nn.QuantizedLinear, QuantizedSwitchLinear))
        for name, value in module.items():
            if not isinstance(value, mx.array) or name.startswith("_"):
                continue
            if packed and name in ("scales", "biases") and not packed_too:
                continue
            if mx.issubdtype(value.dtype, mx.floating):
                module[name] = value.astype(mx.float32)


def network_nbytes(network: nn.Module) -> int:
    """What the parameters take in memory, read or not."""
    arrays: list[tuple[str, Any]] = tree_flatten(network.parameters())  # type: ignore[assignment]
    return sum(array.nbytes for _, array in arrays)


def evaluate(network: nn.Module) -> None:
    """Read all arrays now, parameters or not: a lazy array belongs to the thread that made it."""
    for module in network.modules():
        mx.eval([value for value in module.values() if isinstance(value, mx.array)])
