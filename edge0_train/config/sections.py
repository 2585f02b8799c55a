"""Sections of YAML files that hold settings by phase: `{all: {threads: 1}, student_sft: {optim: {steps: 360}}}`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.config.fields import all_settings, nearest_setting
from edge0_train.config.phases import PHASES

ALL, LIKE = "all", "like"


def check_section(where: str, section: Any) -> None:
    """Raise Edge0Error, naming file, field and fix, unless the section has known phases and known settings."""
    if not isinstance(section, Mapping):
        raise Edge0Error(f"{where}: {section!r} is not a mapping of phases to settings")
    for key, values in section.items():
        if key == LIKE and isinstance(values, str):
            continue
        if key not in (ALL, *PHASES):
            raise Edge0Error(
                f"{where}.{key}: no such phase; choose one of {', '.join((ALL, *PHASES))}, or {LIKE}: TIER"
            )
        if values is None:
            continue
        for name in _names(f"{where}.{key}", values):
            if name not in all_settings():
                raise Edge0Error(f"{where}.{key}.{name}: no such setting; did you mean {nearest_setting(name)}?")


def _names(where: str, values: Any, prefix: str = "") -> Iterator[str]:
    if not isinstance(values, Mapping):
        raise Edge0Error(f"{where}: {values!r} is not a mapping of settings to values")
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _names(f"{where}.{key}", value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
