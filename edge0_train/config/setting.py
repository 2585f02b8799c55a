"""What one setting is: a default, bounds, choices and a sentence; and the check that follows from it."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import shown

Choices = tuple[str, ...] | Callable[[], tuple[str, ...]]
MOST = 10**9
"""No setting has a sensible number beyond it: one that is larger is a slip, and would end in an overflow hours later."""


@dataclass(frozen=True)
class Setting:
    """The declaration of one field; `setting` puts it there.

    Attributes:
        sentence: what the setting does, for `configs/train.yaml` and the page of all settings.
        default: as in YAML, so it may be an interpolation; empty where a phase that reads it must be told (`PhaseFacts.needs`).
        least, above, at_most: bounds of a number: >=, > and <=; without them it lies within -`MOST` and `MOST`.
        choices: the values allowed (of a list: of its items), or a function that looks them up.
        may_be_empty: an empty text means something, or the phase that reads it asks for it.
        volatile: may differ between a run and its continuation.
    """

    sentence: str
    default: Any
    least: float | None = None
    above: float | None = None
    at_most: float | None = None
    choices: Choices = ()
    may_be_empty: bool = False
    volatile: bool = False

    def allowed(self) -> tuple[str, ...]:
        """The choices, looked up; none for a setting that has none."""
        return self.choices() if callable(self.choices) else self.choices

    def limits(self) -> str:
        """Choices or bounds as a reader wants them: `kl | bce`, `> 0, <= 1`; empty without any."""
        bounds = ((">=", self.least), (">", self.above), ("<=", self.at_most))
        return " | ".join(self.allowed()) or ", ".join(f"{sign} {bound}" for sign, bound in bounds if bound is not None)

    def check(self, name: str, value: Any) -> None:
        """Raise Edge0Error, naming field, value and fix, unless `value` lies within bounds and choices.

        The default is not looked up: a registry of choices may cost the import of torch.
        """
        if self.choices and value != self.default:
            allowed = self.allowed()
            for item in value if isinstance(value, tuple) else (value,):
                if item not in allowed:
                    raise Edge0Error(f"{name}: {item!r} is unknown; choose one of {', '.join(allowed)}")
        if isinstance(value, str):
            self._check_text(name, value)
        elif isinstance(value, int | float):
            self._check_number(name, value)

    def _check_text(self, name: str, value: str) -> None:
        if not value.strip() and not self.may_be_empty:
            raise Edge0Error(f"{name}: empty; give a value, or leave it out for the default ({self.default})")
        if not value.isprintable():
            raise Edge0Error(f"{name}: {shown(value)} has characters that cannot be printed; retype it")

    def _check_number(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            raise Edge0Error(f"{name}: {value} is not finite; give a number")
        least, most = (
            limit if limit is not None else sign * MOST for limit, sign in ((self.least, -1), (self.at_most, 1))
        )
        if value < least:
            raise Edge0Error(f"{name}: {shown(value)} is below {least}; raise it")
        if self.above is not None and value <= self.above:
            raise Edge0Error(f"{name}: {value} must be larger than {self.above}; raise it")
        if value > most:
            raise Edge0Error(f"{name}: {shown(value)} is above {most}; lower it")


def setting(sentence: str, default: Any, **facts: Any) -> Any:
    """A dataclass field that is a setting; `facts` are the further fields of `Setting`."""
    return dataclasses.field(metadata={"setting": Setting(sentence, default, **facts)})


def names_in(module: str, registry: str) -> Callable[[], tuple[str, ...]]:
    """The names of a registry, which is imported when somebody asks for them."""
    return lambda: tuple(getattr(importlib.import_module(module), registry))
