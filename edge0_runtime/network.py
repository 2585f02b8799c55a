"""mlx-lm's network of a checkpoint: made without reading, brought to the compute dtype, then read.

Published files that mlx-lm's own model class would not take as they are are read too.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from edge0_runtime.activations import KV_GROUP, SLICE
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.families import PROJECTIONS, Family
from edge0_runtime.contract.files import one_line
from edge0_runtime.contract.links import ABSORBED
from edge0_runtime.libraries import QuantizedSwitchLinear, load_model, make_prompt_cache

Weights = dict[str, mx.array]
GROUP_SIZE = 64  # mlx's own, where config.json says nothing
KV_BITS = (8, 4)


def load_network(directory: Path, layout: Family, *, float32: bool) -> nn.Module:
    """mlx-lm's model of `layout`'s family; nothing is read from the files yet.

    The family decides the class, not config.json: one model_type may stand for several networks (bailing_hybrid).

    Args:
        float32: whether it will compute in float32; else in the dtype of the file's scales.
    """
    library: Any = importlib.import_module(f"mlx_lm.models.{layout.name}")

    def classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        quantization = config.get("quantization") or config.get("quantization_config") or {}

        class Network(library.Model):  # type: ignore[misc]  # which class it is, the family says
            def sanitize(self, weights: Weights) -> Weights:
                weights = as_mlx_lm_names(weights, layout)
                weights = unpack_absorbed(weights, quantization.get("group_size", GROUP_SIZE), float32=float32)
                sane: Weights = super().sanitize(weights)
                return sane

        return Network, library.ModelArgs

    try:
        network: nn.Module = load_model(directory, lazy=True, get_model_classes=classes)[0]
        # A pass that is built and never computed: fields that no shape of a parameter depends on are first used in it.
        network(mx.zeros((1, 2), mx.int32))
    except Exception as error:  # whatever a field of config.json that no tier knows makes of it
        raise Edge0Error(
            f"{directory}: mlx-lm can't load this checkpoint: {type(error).__name__}: {one_line(error)};"
            " copy config.json from the base again"
        ) from error
    return network


def prompt_cache(network: nn.Module, kv_bits: int | None) -> list[Any]:
    """mlx-lm's prompt cache, empty; its keys and values in `kv_bits` bits from the first token on, None: as they are computed."""
    entries: list[Any] = make_prompt_cache(network)
    if kv_bits is None:
        return entries
    return [entry.to_quantized(KV_GROUP, kv_bits) if hasattr(entry, "to_quantized") else entry for entry in entries]


def check_kv_bits(network: nn.Module, kv_bits: int | None) -> None:
    """Raise Edge0Error where mlx-lm can't serve this network with keys and values of so many bits; nothing is computed."""
    if kv_bits is None:
        return
    if kv_bits not in KV_BITS:
        raise Edge0Error(f"kv_bits: {kv_bits!r} must be one of {', '.join(map(str, KV_BITS))}, or left out")
    try:
        for tokens in (2, 1):  # latent attention computes one token in another way
            network(mx.zeros((1, tokens), mx.int32), cache=prompt_cache(network, kv_bits))
    except Exception as error:
        raise Edge0Error(
            f"kv_bits: mlx-lm has no attention for keys and values of {kv_bits} bits in this model"
            f" ({type(error).__name__}: {one_line(error)}); leave --kv-bits out"
        ) from error


def to_float32(network: nn.Module, *, packed_too: bool) -> None:
    """Have the network compute in float32.

    Quantised matmuls take bf16 scales and biases beside float32 activations, with the same bits as result
    (docs/parity.md 4), at half the memory; but mlx casts them in every call, which a small model feels (10 % of
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


def widened_nbytes(network: nn.Module) -> tuple[int, int]:
    """(what all parameters take more in float32, what the largest module's cast for one call take where they stay packed)."""
    grown = [
        sum(
            value.size * 4 - value.nbytes
            for value in module.values()
            if isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating)
        )
        for module in network.modules()
    ]
    return sum(grown), 2 * max(grown)


def share_base(mine: Mapping[str, nn.Module], theirs: Mapping[str, nn.Module]) -> None:
    """Have modules hold the very arrays that the modules of the same paths hold in another network of the same checkpoint."""
    for path, module in mine.items():
        for name, value in theirs[path].items():
            if isinstance(value, mx.array):
                module[name] = value


def evaluate(network: nn.Module) -> None:
    """Read all arrays now, parameters or not: a lazy array belongs to the thread that made it."""
    for module in network.modules():
        mx.eval([value for value in module.values() if isinstance(value, mx.array)])


def as_mlx_lm_names(weights: Weights, layout: Family) -> Weights:
    """Experts under mlx-lm's own path, and without the tensors that belong to no model (`Family.ignored`)."""
    named = {}
    for name, value in weights.items():
        layer, below = _below_its_layer(name)
        if layer and below.startswith(layout.ignored):
            continue
        for path in layout.other_experts:
            if layer and below.startswith(tuple(f"{path}.{projection}." for projection in PROJECTIONS)):
                name = f"{layer}{layout.experts}{below.removeprefix(path)}"
        named[name] = value
    return named


def unpack_absorbed(weights: Weights, group_size: int, *, float32: bool) -> Weights:
    """Dequantise every packed kv_b_proj, once, in float32.

    mlx-lm's latent attention absorbs it into two matrices per head, along whose rows the groups no longer lie: packing
    those again would change the values. They stay float.
    """
    unpacked = dict(weights)
    for name in weights:
        if not name.endswith(f".{ABSORBED}.scales"):
            continue
        module = name.removesuffix(".scales")
        packed, scales, biases = (unpacked.pop(f"{module}.{part}") for part in ("weight", "scales", "biases"))
        bits = packed.shape[-1] * 32 // (scales.shape[-1] * group_size)
        value = mx.dequantize(packed, scales.astype(mx.float32), biases.astype(mx.float32), group_size, bits)
        unpacked[f"{module}.weight"] = value if float32 else value.astype(scales.dtype)
    return unpacked


def _below_its_layer(name: str) -> tuple[str, str]:
    """(path of its layer with a dot at the end, rest) of a tensor's name; ("", name) outside of all layers."""
    match = re.match(r".*?\.layers\.\d+\.", name)
    return ("", name) if match is None else (match[0], name[match.end() :])


def take_slices(mixer: Any) -> None:
    """Have a recurrent mixer take a prompt's chunk in slices, each evaluated before the next.

    Without a kernel of its own (Metal has one) mlx's graph of the recurrence holds the state after every token of the chunk at
    the same time: 2 MiB each in a layer of the 35b.
    """
    mixer.__class__ = _sliced(type(mixer))


def _sliced(mixer: type[nn.Module]) -> type[nn.Module]:
    class Sliced(mixer):  # type: ignore[misc,valid-type]  # which class it is, the family says
        def __call__(self, x: mx.array, mask: mx.array | None, cache: Any) -> mx.array:
            """[1, T, D] -> [1, T, D], through the states that `cache` carries from token to token."""
            parts = []
            for start in range(0, x.shape[1], SLICE):
                parts.append(super().__call__(x[:, start : start + SLICE], mask, cache))
                if x.shape[1] > SLICE:
                    mx.eval(parts[-1], cache.state)
            output: mx.array = mx.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
            return output

    return Sliced
