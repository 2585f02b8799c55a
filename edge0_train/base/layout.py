"""What an int4 checkpoint of a family holds, from its config.json alone: every tensor's name, shape and dtype.

    targets = checkpoint_layout(config, family("qwen3_5_moe"))
    {name: kind for target in targets for name, kind in target.stored().items()}    # 1,757 tensors for tier 35b

Shapes are those of transformers' model on the meta device; no weights are needed. Quantising writes by this plan,
and what a loader must find is the same list.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from transformers import PreTrainedModel

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.families import PROJECTIONS, QUANTISED_PARTS, Family, Names
from edge0_runtime.contract.files import raise_problems
from edge0_runtime.contract.links import Link
from edge0_runtime.contract.tier import Tier
from edge0_train.base.affine import quantize
from edge0_train.base.links import to_mlx
from edge0_train.base.load import empty_model, parameter_shapes
from edge0_train.base.packed import pack, packable
from edge0_train.base.weights import Codes

Kind = tuple[tuple[int, ...], torch.dtype]
"""A stored tensor's shape and dtype."""
BITS = {"int4": 4, "int8": 8}
GROUP_SIZE = 64
_CAST_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Target:
    """One MLX tensor to write: of `dtype` if `bits` is 0; else packed, with scales and biases of `dtype`.

    Attributes:
        link: the row of the name table that it belongs to, at its layer.
        shape: of the float tensor.
    """

    link: Link
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: int

    @property
    def module(self) -> str:
        """The MLX module path, which `Links` and config.json's quantization block go by."""
        return self.name.removesuffix(".weight")

    def stored(self) -> dict[str, Kind]:
        """{tensor name: (shape, dtype)} as written."""
        if not self.bits:
            return {self.name: (self.shape, self.dtype)}
        *rows, width = self.shape
        groups = (*rows, width // GROUP_SIZE)
        return {
            self.name: ((*rows, width * self.bits // 32), torch.uint32),
            f"{self.module}.scales": (groups, self.dtype),
            f"{self.module}.biases": (groups, self.dtype),
        }

    def make(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors to write, from the float one. Raises Edge0Error if a value is not finite."""
        made = (tensor,) if not self.bits else quantize(tensor, self.bits, GROUP_SIZE)
        if not all(part.isfinite().all() for part in made if part.is_floating_point()):
            raise Edge0Error(
                f"{self.name}: has values that are not finite in {self.dtype}; "
                "the source is damaged, or needs a wider dtype in its config.json"
            )
        return dict(zip(self.stored(), made, strict=True))


def cast_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that mlx-lm's convert casts to; None leaves every tensor in its own. A flat config's `dtype` does not count."""
    return _CAST_DTYPES.get(config.get("torch_dtype") or config.get("text_config", {}).get("dtype"))


def link_targets(link: Link, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> tuple[Target, ...]:
    """What a parameter is stored as; `shapes` are those of its float MLX tensors."""
    return tuple(
        Target(link, name, part, dtype, _bits(link, part)) for name, part in zip(link.mlx, shapes, strict=True)
    )


def checkpoint_layout(config: Mapping[str, Any], layout: Family, names: Names = "mlx") -> list[Target]:
    """All tensors of an int4 checkpoint, in the model's order.

    Args:
        config: a config.json as `names.mlx_config` returns it; bfloat16 where it names no dtype.
        names: whose names its tensors have.

    Raises:
        Edge0Error: a parameter of the transformers model has no row in its name table (all are listed).
    """
    # A_log is not cast by mlx-lm, so it keeps the original's dtype: bfloat16 too in the published 35b, by its size.
    cast = cast_dtype(config) or torch.bfloat16
    targets: list[Target] = []
    problems: list[str] = []
    text_config = config.get("text_config", config)
    for hf_name, shape in parameter_shapes(empty_model(text_config, layout, torch.float32)).items():
        link = layout.written_link(hf_name, text_config, names)
        if link is None:
            problems.append(f"{hf_name}: a parameter of the transformers model without a row in its name table")
            continue
        made = to_mlx(link, torch.empty(shape, device="meta"), text_config)
        targets += link_targets(link, [tuple(tensor.shape) for tensor in made], cast)
    raise_problems(f"family {layout.name}: no layout", problems, "add the rows")
    return targets


def pack_sketch(model: PreTrainedModel, config: Mapping[str, Any], layout: Family, dtype: torch.dtype) -> None:
    """Pack a model on the meta device as an int4 checkpoint of ours would have it: sizes without a checkpoint."""
    targets = {target.module: target for target in checkpoint_layout(config, layout) if target.bits}
    links = {target.link.hf: target.link for target in targets.values()}

    def codes(module: str) -> Codes:
        target = targets[module]
        words, scales, biases = (
            torch.empty(shape, dtype=kind, device="meta") for shape, kind in target.stored().values()
        )
        return Codes(words.view(torch.int32), scales, biases, target.bits, GROUP_SIZE)

    pack(model, packable(model, links, targets), codes, dtype, torch.device("meta"))


def quantization_block(targets: Sequence[Target]) -> dict[str, Any]:
    """`quantization` of config.json: 4 bits, and every module that has others by its name."""
    block: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": 4, "mode": "affine"}
    return block | {t.module: {"group_size": GROUP_SIZE, "bits": t.bits} for t in targets if t.bits not in (0, 4)}


def nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a dense tensor."""
    return math.prod(shape) * dtype.itemsize


def expert_nbytes(targets: Sequence[Target], tier: Tier) -> int:
    """Bytes of all routed experts in a checkpoint of `targets`."""
    keys = product(tier.layout.moe_layers(tier.architecture), PROJECTIONS, QUANTISED_PARTS)
    experts = {name for key in keys for name in tier.layout.expert_tensors(*key)}
    stored = {name: kind for target in targets for name, kind in target.stored().items()}
    return sum(nbytes(*kind) for name, kind in stored.items() if name in experts)


def _bits(link: Link, shape: Sequence[int]) -> int:
    """Code width; 0 for a float tensor. Like mlx-lm, what groups do not divide stays float."""
    return 0 if link.stored == "float" or shape[-1] % GROUP_SIZE else BITS[link.stored]
