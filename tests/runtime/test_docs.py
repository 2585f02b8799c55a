"""The drawing of a decode step in docs/streaming.md names what there is."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import edge0_runtime
from edge0_runtime.arms.prerouter import Prerouter
from edge0_runtime.engine import Engine
from edge0_runtime.experts.memory import ExpertMemory
from edge0_runtime.experts.pool import SlotPool
from edge0_runtime.experts.store import ExpertStore
from edge0_runtime.experts.streaming import StreamingSwitchGLU
from edge0_runtime.gates import Gate
from edge0_runtime.sequence import Sequence
from edge0_runtime.step import Step

DRAWING = re.search(
    r"^## One decode step\n.*?```\n(.*?)```",
    (Path(__file__).parents[2] / "docs" / "streaming.md").read_text(),
    re.S | re.M,
)


def classes() -> dict[str, type]:
    """All classes of the runtime by name."""
    names = [
        m.name for m in pkgutil.walk_packages(edge0_runtime.__path__, "edge0_runtime.") if "__main__" not in m.name
    ]
    found: dict[str, type] = {}
    for name in names:
        for value in vars(importlib.import_module(name)).values():
            if inspect.isclass(value) and value.__module__ == name:
                found[value.__name__] = value
    return found


def test_every_name_in_the_drawing_of_a_step_exists() -> None:
    assert DRAWING is not None
    known = classes()
    text = DRAWING[1]
    members = re.findall(r"\b([A-Z]\w+)\.(\w+)", text)
    assert len(members) > 25
    for owner, member in members:
        assert owner in known, f"{owner} is no class of the runtime"
        source = inspect.getsource(known[owner])
        exists = hasattr(known[owner], member) or re.search(rf"\b(self\.)?{member}\b(:| =|,) ", source)
        assert exists, f"{owner}.{member} does not exist"
    for name in ("Heads", "Features", "Routing", "Lookahead", "Prerouter"):
        assert name in text and name in known


def test_the_calls_of_a_step_come_in_the_drawings_order(
    tiny_dir: Path, budget: Callable[..., float], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call's first occurrence in a step of a model that streams, with predicted layers and layers on their own gates."""
    assert DRAWING is not None
    watched = {
        **{f"Sequence.{name}": (Sequence, name) for name in ("foresee", "flush", "run")},
        **{f"Arm.{name}": (Prerouter, name) for name in ("foresee", "hints", "route", "look_ahead", "remember")},
        **{f"Step.{name}": (Step, name) for name in ("dropped", "stage", "proceed")},
        **{f"ExpertMemory.{name}": (ExpertMemory, name) for name in ("release", "turn", "want")},
        "ExpertStore.check": (ExpertStore, "check"),
        "SlotPool.want": (SlotPool, "want"),
        "Gate.__call__": (Gate, "__call__"),
        "StreamingSwitchGLU.__call__": (StreamingSwitchGLU, "__call__"),
        "SlotPool.acquire": (SlotPool, "acquire"),
        "SlotPool.locate": (SlotPool, "locate"),
    }
    calls: list[str] = []

    def spy(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return call

    for name, (owner, attribute) in watched.items():
        monkeypatch.setattr(owner, attribute, spy(name, getattr(owner, attribute)))
    with Engine.load(tiny_dir, memory_budget=budget(tiny_dir, 20)) as engine:
        list(engine.generate(prompts[2], max_tokens=5, ignore_eos=True))
    first, second = [index for index, name in enumerate(calls) if name == "Sequence.foresee"][2:4]
    drawn = list(dict.fromkeys(re.findall(r"\b[A-Z]\w+\.\w+", DRAWING[1])))
    assert list(dict.fromkeys(calls[first:second])) == [name for name in drawn if name in watched]
