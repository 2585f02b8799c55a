"""What would make a model faster, each with a command: a larger budget, stickier routing, a smaller K."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import Sticky, Tier, builtin_tier, builtin_tier_names
from edge0_runtime.measure.forecast import Band, Forecast, forecast
from edge0_runtime.measure.subject import Subject, changed
from edge0_runtime.plan import GIB

WORTH = 1.05  # times as fast, at either end of the band
STICKY = Sticky(bias=2.0, window=2)
SUPPOSED = ("k", "sticky", "memory")  # options about adapters, or a machine, that may not be there
SERVED = ("adapters", "tier", "memory-budget", "context")  # options that `serve` has too


@dataclass(frozen=True)
class Advice:
    """What to change, the command for it, and the speed that is expected then."""

    change: str
    command: str
    tokens_per_second: Band

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self) | {"tokens_per_second": list(self.tokens_per_second)}


class Asked(NamedTuple):
    """What doctor was asked about, and with which options, by name; None: not given."""

    what: str
    options: Mapping[str, Any]

    def command(self, name: str, **changed: Any) -> str:
        """A command of edge0_runtime about the same, with those options that it has too."""
        changed = {option.replace("_", "-"): value for option, value in changed.items()}
        options = {option: value for option, value in self.options.items() if name == "doctor" or option in SERVED}
        options = {option: value for option, value in options.items() if option not in changed} | changed
        given = ((f"--{option}", str(value)) for option, value in options.items() if value is not None)
        return shlex.join(["edge0_runtime", name, self.what, *itertools.chain.from_iterable(given)])


def advice(asked: Asked, subject: Subject, chosen: Forecast, rows: Sequence[Forecast]) -> list[Advice]:
    """What is worth it, the easiest change first.

    Args:
        rows: of other budgets. chosen: of the budget that is changed nothing about.
    """
    now = chosen.tokens_per_second
    if now is None:
        return []
    possible = (*_larger_budget(asked, subject, rows), *_retrained(asked, subject.tier, chosen))
    return [
        one
        for one in possible
        if any(then > WORTH * speed for then, speed in zip(one.tokens_per_second, now, strict=True))
    ]


def _larger_budget(asked: Asked, subject: Subject, rows: Sequence[Forecast]) -> Iterator[Advice]:
    here = subject.source == "directory" and not any(asked.options[option] for option in SUPPOSED)
    name = "serve" if here else "doctor"
    for row in rows[-1:]:
        if row.tokens_per_second is not None:
            command = asked.command(name, memory_budget=gib_at_least(row.plan.budget_bytes, 4))
            yield Advice("a larger budget", command, row.tokens_per_second)


def gib_at_least(nbytes: int, digits: int) -> str:
    """GiB in so many digits, rounded up: a budget may just hold what it is said to hold."""
    unit = 10.0 ** (math.floor(math.log10(nbytes / GIB)) + 1 - digits)
    return f"{math.ceil(nbytes / GIB / unit) * unit:.{digits}g}"


def _retrained(asked: Asked, tier: Tier, chosen: Forecast) -> Iterator[Advice]:
    """Adapters trained for another router or K. The computing is taken as it is, though a smaller K saves some of it."""
    other: list[tuple[str, int | None, Sticky | None]] = []
    if not tier.router.sticky:
        other.append(("sticky routing", None, STICKY))
    if tier.k > 1:
        other.append((f"K {tier.k // 2}", tier.k // 2, None))
    for change, k, sticky in other:
        try:
            then = changed(tier, k, sticky)
        except Edge0Error:  # not with this family's router
            continue
        if (command := _training(then)) is None:
            command = asked.command(
                "doctor", **({"sticky": f"{STICKY.bias:g},{STICKY.window}"} if sticky else {"k": k})
            )
        plan = replace(chosen.plan, step_experts=chosen.plan.step_experts * then.k // tier.k)
        speed = forecast(plan, then, chosen.step_seconds, chosen.bytes_per_second).tokens_per_second
        if speed is not None:
            yield Advice(f"{change}, trained for", command, speed)


def _training(tier: Tier) -> str | None:
    """The command that trains the tier, if it is a built-in one but for K and stickiness."""
    if tier.name not in builtin_tier_names():
        return None
    builtin, sticky = builtin_tier(tier.name), tier.router.sticky
    if changed(builtin, tier.k, sticky) != tier:
        return None
    settings = [f"tier.k={tier.k}"] * (tier.k != builtin.k)
    if sticky != builtin.router.sticky:
        settings += [f"tier.router.sticky.bias={sticky.bias:g}", f"tier.router.sticky.window={sticky.window}"]
    return shlex.join(["python", "-m", "edge0_train", "phase=all", f"tier={tier.name}", *settings])
