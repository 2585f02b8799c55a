"""Reading the fields of a stranger's tier: each reader returns the value, or raises one sentence with field, value and fix."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from edge0_runtime.contract.base_config import shown_name
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import shown

MAX_COUNT = 2**20
"""Bound on what a stranger's file may ask us to build."""


def check_fields(where: str, cls: type, data: Mapping[str, Any]) -> None:
    """Raise Edge0Error unless `data` has exactly the fields of the dataclass `cls` (those with a default may be absent)."""
    if not isinstance(data, Mapping):
        raise Edge0Error(f"{where}: {shown(data)} is not a mapping of fields to values")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(shown_name(str(name)) for name in set(data) - set(fields))
    missing = sorted(n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in data)
    if unknown or missing:
        parts = [f"unknown: {', '.join(unknown)}"] * bool(unknown) + [f"missing: {', '.join(missing)}"] * bool(missing)
        raise Edge0Error(f"{where}: fields {'; '.join(parts)}; the fields are {', '.join(fields)}")


def layers(field: str, value: Any) -> tuple[int, ...]:
    """A list of layer indices, or {first, last} for a run of them."""
    if isinstance(value, Mapping) and set(value) == {"first", "last"}:
        first, last = value["first"], value["last"]
        if type(first) is int and type(last) is int and 0 <= first <= last < MAX_COUNT:
            return tuple(range(first, last + 1))
    elif isinstance(value, (list, tuple)) and all(type(n) is int for n in value):
        return tuple(value)
    raise Edge0Error(f"tier.{field}: {shown(value)} is neither a list of layer indices nor {{first: N, last: M}}")


def runs(numbers: Iterable[int]) -> str:
    """Layer indices for people: [1, 2, 3, 7] -> "1..3, 7"; none -> "none"."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in found) or "none"


def text(field: str, value: Any) -> str:
    """A plain name: it becomes part of file names and messages, and tiers are read from strangers' files."""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", value):
        raise Edge0Error(
            f"tier.{field}: {shown(value)} is not a plain name of letters, digits, dots, dashes and underscores"
        )
    return value


def texts(field: str, value: Any) -> tuple[str, ...]:
    """A list of plain names."""
    if not isinstance(value, (list, tuple)):
        raise Edge0Error(f"tier.{field}: {shown(value)} is not a list")
    return tuple(text(field, one) for one in value)


def count(field: str, value: Any, least: int = 1) -> int:
    """A whole number in least..MAX_COUNT; true and 1.0 are none."""
    if type(value) is not int or not least <= value <= MAX_COUNT:
        raise Edge0Error(
            f"tier.{field}: {shown(value)} is not a whole number of at least {least} (and at most {MAX_COUNT})"
        )
    return value


def positive(field: str, value: Any) -> float:
    """A finite number above 0, as a float."""
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise Edge0Error(f"tier.{field}: {shown(value)} is not a number larger than 0")
    return float(value)


def flag(field: str, value: Any) -> bool:
    """true or false; 0 and 1 are neither."""
    if type(value) is not bool:
        raise Edge0Error(f"tier.{field}: {shown(value)} is neither true nor false")
    return value


def choice(field: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise Edge0Error, which lists what is `allowed`, for anything else."""
    if value not in allowed:
        raise Edge0Error(f"tier.{field}: {shown(value)} is unknown; choose one of {', '.join(allowed)}")
