"""What would make a model faster, each with a command: a larger budget, stickier routing, a smaller K."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import Sticky, Tier, builtin_tier_names
from edge0_runtime.measure.forecast import Band, Forecast, forecast
from edge0_runtime.measure.subject import Subject, changed
from edge0_runtime.plan import GIB

WORTH = 1.05  # times as fast, at either end of the band
STICKY = Sticky(bias=2.0, window=2)


@dataclass(frozen=True)
class Advice:
    """What to change, the command for it, and the speed that is expected then."""

    change: str
    command: str
    tokens_per_second: Band

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self) | {"tokens_per_second": list(self.tokens_per_second)}


def advice(what: str, subject: Subject, chosen: Forecast, rows: Sequence[Forecast]) -> list[Advice]:
    """What is worth it, the easiest change first.

    Args:
        what: as doctor was asked. rows: of other budgets. chosen: of the budget that is changed nothing about.
    """
    now = chosen.tokens_per_second
    if now is None:
        return []
    possible = (*_larger_budget(what, subject, rows), *_retrained(what, subject.tier, chosen))
    return [
        one
        for one in possible
        if any(then > WORTH * speed for then, speed in zip(one.tokens_per_second, now, strict=True))
    ]


def _larger_budget(what: str, subject: Subject, rows: Sequence[Forecast]) -> Iterator[Advice]:
    command = "serve" if subject.source == "directory" else "doctor"
    for row in rows[-1:]:
        if row.tokens_per_second is not None:
            budget = f"--memory-budget {row.plan.budget_bytes / GIB:.4g}"
            yield Advice(
                "a larger budget", f"edge0_runtime {command} {shlex.quote(what)} {budget}", row.tokens_per_second
            )


def _retrained(what: str, tier: Tier, chosen: Forecast) -> Iterator[Advice]:
    """Adapters trained for another router or K. The computing is taken as it is, though a smaller K saves some of it."""
    other: list[tuple[str, int | None, Sticky | None, str, str]] = []
    if not tier.router.sticky:
        bias, window = f"{STICKY.bias:g}", STICKY.window
        settings = f"tier.router.sticky.bias={bias} tier.router.sticky.window={window}"
        other.append(("sticky routing", None, STICKY, settings, f"--sticky {bias},{window}"))
    if tier.k > 1:
        other.append((f"K {tier.k // 2}", tier.k // 2, None, f"tier.k={tier.k // 2}", f"--k {tier.k // 2}"))
    for change, k, sticky, settings, options in other:
        try:
            then = changed(tier, k, sticky)
        except Edge0Error:  # not with this family's router
            continue
        if tier.name in builtin_tier_names():
            command = f"python -m edge0_train phase=all tier={tier.name} {settings}"
        else:
            command = f"edge0_runtime doctor {shlex.quote(what)} {options}"
        plan = replace(chosen.plan, step_experts=chosen.plan.step_experts * then.k // tier.k)
        speed = forecast(plan, then, chosen.step_seconds, chosen.bytes_per_second).tokens_per_second
        if speed is not None:
            yield Advice(f"{change}, trained for", command, speed)
