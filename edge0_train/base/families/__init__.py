"""What training needs of a family beyond its data (`edge0_runtime/contract/families`): one module a family, where there is any.

A module here is found by the family's name. It may have
    CPU_OPTIONS: options of a transformers model's forward pass on a CPU, which change its time and not its result.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def cpu_options(family: str) -> Mapping[str, Any]:
    """The `CPU_OPTIONS` of a family; none for most."""
    name = f"{__name__}.{family}"
    return getattr(import_module(name), "CPU_OPTIONS", {}) if find_spec(name) else {}
