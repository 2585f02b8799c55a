"""What one setting is: a default, bounds, choices and a sentence; and the check that follows from it."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edge0_runtime.contract.errors import Edge0Error

Choices = tuple[str, ...] | Callable[[], tuple[str, ...]]


@dataclass(frozen=True)
class Setting:
    """The declaration of one field; `setting` puts it there.

    Attributes:
        sentence: what the setting does, for `configs/train.yaml` and the page of all settings.
        default: as in YAML, so it may be an interpolation; empty where a phase that reads it must be told (`PhaseFacts.needs`).
        least, above, at_most: bounds of a number: >=, > and <=.
        choices: the values allowed (of a list: of its items), or a function that looks them up.
        example: an assignment to suggest when a phase needs a value and there is none.
        volatile: may differ between a run and its continuation.
    """

    sentence: str
    default: Any
    least: float | None = None
    above: float | None = None
    at_most: float | None = None
    choices: Choices = ()
    example: str = ""
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
        # Written so that NaN fails.
        if self.least is not None and not value >= self.least:
            raise Edge0Error(f"{name}: {value} is below {self.least}; raise it")
        if self.above is not None and not value > self.above:
            raise Edge0Error(f"{name}: {value} must be larger than {self.above}; raise it")
        if self.at_most is not None and not value <= self.at_most:
            raise Edge0Error(f"{name}: {value} is above {self.at_most}; lower it")


def setting(sentence: str, default: Any, **facts: Any) -> Any:
    """A dataclass field that is a setting; `facts` are the further fields of `Setting`."""
    return dataclasses.field(metadata={"setting": Setting(sentence, default, **facts)})


def names_in(module: str, registry: str) -> Callable[[], tuple[str, ...]]:
    """The names of a registry, which is imported when somebody asks for them."""
    return lambda: tuple(getattr(importlib.import_module(module), registry))
