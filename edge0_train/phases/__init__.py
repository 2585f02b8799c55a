"""One module per phase, with a function of its name: build, print the plan, loop, export. `config.PHASES` lists them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from edge0_train.config import PHASES, Config
from edge0_train.run import Run

Phase = Callable[[Config, Run], dict[str, Any]]


def phase_function(name: str) -> Phase:
    """The function that does a phase, imported when it is asked for."""
    assert name in PHASES, name
    function: Phase = getattr(importlib.import_module(f"edge0_train.phases.{name}"), name)
    return function
