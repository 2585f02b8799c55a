"""A model directory of the right names, shapes and sizes without its tensors: they are holes, so it takes no room.

The planner and the loader then say of a model that isn't there what they would say of the real one.

    write_outline(directory, outline_of_tier(tier))
    write_outline(directory, shortened(Checkpoint.open(model), tier, layers=4, experts=16))
"""

from __future__ import annotations

import copy
import importlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.family import Architecture, Family
from edge0_runtime.contract.links import Link, without_layer
from edge0_runtime.contract.strict_safetensors import DTYPE_BYTES
from edge0_runtime.contract.tier import Tier
from edge0_runtime.libraries import CONFIG_MAPPING, PreTrainedConfig
from edge0_runtime.network import GROUP_SIZE

Kind = tuple[str, tuple[int, ...]]
"""A stored tensor's dtype, as safetensors names it, and its shape."""
BITS = {"int4": 4, "int8": 8}


@dataclass(frozen=True)
class Outline:
    """config.json, and {tensor name: dtype and shape}."""

    config: dict[str, Any]
    tensors: dict[str, Kind]


def write_outline(directory: Path, outline: Outline) -> None:
    """Write config.json and one `model.safetensors` of holes into an existing directory."""
    (directory / "config.json").write_text(json.dumps(outline.config), encoding="utf-8")
    header, end = {}, 0
    for name, (dtype, shape) in outline.tensors.items():
        start, end = end, end + DTYPE_BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    write_holes(directory / "model.safetensors", len(text).to_bytes(8, "little") + text, 8 + len(text) + end)


def write_holes(path: Path, beginning: bytes, nbytes: int) -> None:
    """A file of that size which holds its beginning alone."""
    with path.open("wb") as file:
        file.write(beginning)
        file.truncate(nbytes)


# -- of a tier ---------------------------------------------------------------------------------------------------------


def outline_of_tier(tier: Tier) -> Outline:
    """The int4 base that `phase=quantize` writes for the tier, under the published names; mlx-lm's network gives shapes."""
    layout = tier.layout
    config = layout.mlx_config(_filled(layout.hf_model_type, tier.config_fields()), _filled)
    library: Any = importlib.import_module(f"mlx_lm.models.{layout.name}")
    network = library.Model(library.ModelArgs.from_dict(copy.deepcopy(config)))  # it writes into what it is given
    shapes = {name: array.shape for name, array in _arrays(network.parameters())}
    tensors: dict[str, Kind] = {}
    overrides = {}
    for name, shape, link in _published(shapes, layout, tier.architecture):
        bits = 0 if link.stored == "float" or shape[-1] % GROUP_SIZE else BITS[link.stored]
        if not bits:
            tensors[name] = ("BF16", shape)
            continue
        module, (*rows, width) = name.removesuffix(".weight"), shape
        tensors[name] = ("U32", (*rows, width * bits // 32))
        tensors |= {f"{module}.{part}": ("BF16", (*rows, width // GROUP_SIZE)) for part in ("scales", "biases")}
        if bits != 4:
            overrides[module] = {"group_size": GROUP_SIZE, "bits": bits}
    quantization = {"group_size": GROUP_SIZE, "bits": 4, "mode": "affine"} | overrides
    return Outline(config | {"quantization": quantization}, tensors)


def shortened(checkpoint: Checkpoint, tier: Tier, *, layers: int, experts: int) -> tuple[Outline, Tier]:
    """The same model with its first layers alone and fewer experts in each; every layer but the first is predicted."""
    layout = tier.layout
    config = json.loads(json.dumps(checkpoint.config))
    for part in (config, config.get("text_config", {})):
        changed = {"num_hidden_layers": layers, layout.num_experts: experts}
        part |= {key: value for key, value in changed.items() if key in part}
        part |= {
            key: value[:layers]
            for key, value in part.items()
            if isinstance(value, list) and key.endswith("layer_types")
        }
    tensors: dict[str, Kind] = {}
    for name, (_, entry) in checkpoint.entries.items():
        layer = without_layer(name)[1]
        per_expert = f".{layout.router}." in name or any(
            f".{path}." in name for path in (layout.experts, *layout.other_experts)
        )
        if layer < layers:
            tensors[name] = (entry.dtype, (experts, *entry.shape[1:]) if per_expert else entry.shape)
    architecture = dict(tier.architecture) | {"num_hidden_layers": layers, layout.num_experts: experts}
    first = layout.moe_layers(architecture)[0]
    predicted = tuple(range(first + 1, layers))
    owners = tuple(layer - 1 for layer in predicted)
    return Outline(config, tensors), replace(tier, architecture=architecture, owners=owners, consumers=predicted)


def _filled(model_type: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json's own fields, with transformers' defaults for those that aren't given."""
    anyones = PreTrainedConfig().to_dict().keys() - {"tie_word_embeddings"}
    made = CONFIG_MAPPING[model_type](**fields).to_dict()
    return {name: value for name, value in made.items() if name not in anyones}


def _published(
    shapes: Mapping[str, tuple[int, ...]], layout: Family, arch: Architecture
) -> Iterator[tuple[str, tuple[int, ...], Link]]:
    """mlx-lm's parameters under the names, and in the form, of the published file; and their rows of the table."""
    for name, shape in shapes.items():
        general, layer = without_layer(name)
        link = next(link for link in layout.table if general in link.mlx and link.when(arch, layer))
        forms = [other for other in layout.table if other.hf == link.hf and other.published]
        if not forms:
            yield name, shape, link
        elif link.change != "absorbed":
            yield forms[0].at(layer).mlx[link.mlx.index(general)], shape, forms[0]
        elif general == link.mlx[0]:  # [heads, latent, nope], beside [heads, values, latent]
            heads, latent, nope = shape
            values = shapes[link.at(layer).mlx[1]][1]
            yield forms[0].at(layer).mlx[0], (heads * (nope + values), latent), forms[0]


def _arrays(tree: Any) -> list[tuple[str, mx.array]]:
    leaves: list[tuple[str, mx.array]] = tree_flatten(tree)  # type: ignore[assignment]
    return leaves
