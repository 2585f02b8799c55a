"""Arms: ways to route and to read the experts of the same model, to be measured against each other (docs/method.md 3.2).

A file of this folder is an arm, and the folder is the registry: `on_demand.py` holds the class `OnDemand`. An arm answers four
questions about a `Step`: what is known before it (`foresee`), what routes a layer (`route`), what to read before it begins
(`hints`), and what it leaves to the next one (`remember`). Nothing here imports MLX, so that the command line's help need not.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import Tier

if TYPE_CHECKING:
    import mlx.core as mx

    from edge0_runtime.gates import Gate
    from edge0_runtime.heads import Heads
    from edge0_runtime.routing import Routing
    from edge0_runtime.step import Step

DEFAULT = "prerouter"
ARMS = tuple(
    sorted((module.name for module in pkgutil.iter_modules(__path__)), key=lambda name: (name != DEFAULT, name))
)


@dataclass(frozen=True)
class Parts:
    """What an arm may use of a loaded model.

    Attributes:
        tier: what is served. gates: layer -> its wrapped gate. heads: None where the model was loaded without.
        embed: ids [T] -> the base's embeddings [T, D].
    """

    tier: Tier
    gates: Mapping[int, Gate]
    heads: Heads | None
    embed: Callable[[mx.array], mx.array]


class Arm:
    """Every layer by its own gate, nothing read ahead: what an arm is that changes nothing.

    Attributes:
        exact: it computes what the model computes on its own gates; all exact arms choose the same tokens.
        streams: experts come from the disk; False: all are in memory, in mlx-lm's own modules.
        needs_heads: it can't do without the prerouter file.
    """

    exact: ClassVar[bool] = True
    streams: ClassVar[bool] = True
    needs_heads: ClassVar[bool] = False

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def foresee(self, last: Step, coming: Step) -> None:
        """The coming step's token is chosen, maybe not evaluated.

        Put what is known of its routing into `coming.foreseen`, and what `hints` will look at into `coming.ahead`.
        """

    def hints(self, last: Step, coming: Step) -> None:
        """All arrays are evaluated: have experts of the coming step read (`Step.stage`, `guess`, `want`)."""

    def route(self, step: Step, gate: Gate, x: mx.array) -> Routing:
        """What routes the gate's layer at x [..., T, D]."""
        return gate.own(x)

    def look_ahead(self, step: Step, layer: int) -> tuple[Sequence[int], mx.array] | None:
        """The layer has its experts in `step`: what is known by now of the next step, layers up to it and their experts [L, K].

        Lazily, from what the layers below have left: it is evaluated before the layer's own input.
        """
        return None

    def remember(self, step: Step) -> Any:
        """The pass is built: what the next step's `foresee` will find in `features`. Arrays in lists and tuples."""
        return None

    def features_of(self, arrays: Sequence[mx.array]) -> Any:
        """What `remember` returned, made of all its arrays in their order: of a snapshot that was read from a file."""
        raise NotImplementedError(f"arm {type(self).__name__} leaves no features")


def arm_class(name: str) -> type[Arm]:
    """The arm of that name. Raises Edge0Error naming the known ones."""
    if name not in ARMS:
        raise Edge0Error(f"arm: {name!r} is unknown; choose one of {', '.join(ARMS)}")
    module = importlib.import_module(f"{__name__}.{name}")
    found: type[Arm] = getattr(module, "".join(part.capitalize() for part in name.split("_")))
    return found
