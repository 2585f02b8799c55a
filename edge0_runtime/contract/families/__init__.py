"""The supported families: one data file each, and this folder is the registry.

A module here that does not begin with an underscore has a `FAMILY` of the module's own name; nothing else lists it.
Shapes were checked against the published files to the byte; names are those of mlx-lm's and transformers' model classes.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.family import NAMES, PROJECTIONS, QUANTISED_PARTS, Architecture, Family, Names

__all__ = ["NAMES", "PROJECTIONS", "QUANTISED_PARTS", "Architecture", "Family", "Names", "families", "family"]

_FAMILIES: dict[str, Family] = {
    module.name: import_module(f"{__name__}.{module.name}").FAMILY
    for module in pkgutil.iter_modules(__path__)
    if not module.name.startswith("_")
}


def families() -> tuple[Family, ...]:
    """All families, by name."""
    return tuple(_FAMILIES[name] for name in sorted(_FAMILIES))


def family(name: str) -> Family:
    """The family called `name`. Raises Edge0Error naming the supported ones."""
    if name not in _FAMILIES:
        raise Edge0Error(f"family: {name!r} is not supported; choose one of {', '.join(sorted(_FAMILIES))}")
    return _FAMILIES[name]
