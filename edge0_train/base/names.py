"""Module and tensor names of a family, in transformers' spelling and in MLX's; one table a family in `families/`.

Adding a family adds a module there and a line here, beside its shapes in `edge0_runtime/contract/families.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.base.families import bailing_moe_v3, qwen3_5_moe
from edge0_train.base.families.flat import FLAT_FAMILIES
from edge0_train.base.families.table import Config, FamilyNames, Link

__all__ = ["FamilyNames", "Link", "families", "family_names", "mlx_module", "transformers_module"]

_FAMILIES = {names.family: names for names in (qwen3_5_moe.NAMES, bailing_moe_v3.NAMES, *FLAT_FAMILIES)}


def families() -> tuple[FamilyNames, ...]:
    """The names of all families."""
    return tuple(_FAMILIES.values())


def family_names(family: str) -> FamilyNames:
    """The names of a family. Raises Edge0Error naming the known ones."""
    if family not in _FAMILIES:
        raise Edge0Error(
            f"family: {family!r} has no name table; add one in edge0_train/base/families, known are"
            f" {', '.join(_FAMILIES)}"
        )
    return _FAMILIES[family]


def transformers_module(family: str, mlx_module: str) -> str:
    """`language_model.model.layers.3.self_attn.q_proj` -> `model.layers.3.self_attn.q_proj`.

    Raises:
        Edge0Error: no linear module of that name, or one that transformers fuses (routed experts).
    """
    link = family_names(family).link_of_mlx(f"{mlx_module}.weight")
    return _linear(family, mlx_module, () if link is None else (link,)).hf.removesuffix(".weight")


def mlx_module(family: str, hf_module: str, config: Config) -> str:
    """The way back of `transformers_module`, in a model of that config. Raises Edge0Error as that does."""
    links = family_names(family).links_of_hf(f"{hf_module}.weight", config)
    return _linear(family, hf_module, links).mlx[0].removesuffix(".weight")


def _linear(family: str, path: str, links: Sequence[Link]) -> Link:
    for link in links:
        if link.linear:
            return link
    raise Edge0Error(
        f"module path {path!r}: {family} has no linear module of that name; "
        "the modules that a LoRA may sit on are those of Tier.lora_modules()"
    )
