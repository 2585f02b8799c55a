"""What a memory budget gives: experts held, reads and tokens/s, as bands.

Of a token (docs/streaming.md "What doctor expects"):

computing   C    seconds of a step that waits for nothing, measured on layers of the model's own shape
disk        D    (1 - share of a token's experts that are held) x their bytes / the disk's speed
best             the longer of C and D, at the most hits: reading ahead hides the shorter one
worst            C + D, at the fewest hits: nothing is hidden
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from edge0_runtime.activations import KV_STEP
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import Tier
from edge0_runtime.measure.locality import locality
from edge0_runtime.plan import Plan

MIB = 2**20
MOST = 2**50  # more memory than any machine has


class Band(NamedTuple):
    """What is expected lies between the two."""

    worst: float
    best: float


@dataclass(frozen=True)
class Forecast:
    """One budget of a tier.

    Attributes:
        step_seconds: of computing. bytes_per_second: of the disk; None: not known.
        hits: share of a token's experts that are held already.
    """

    plan: Plan
    step_seconds: float
    bytes_per_second: float | None
    hits: Band

    @property
    def loads(self) -> Band:
        """Experts read for a token."""
        return Band(*(self.plan.step_experts * (1 - share) for share in self.hits))

    @property
    def nbytes(self) -> Band:
        """Bytes read for a token."""
        return Band(*(self.plan.expert_nbytes * count for count in self.loads))

    @property
    def disk_seconds(self) -> Band | None:
        """What the disk needs for them."""
        if self.plan.full:
            return Band(0.0, 0.0)
        return (
            None if self.bytes_per_second is None else Band(*(count / self.bytes_per_second for count in self.nbytes))
        )

    @property
    def tokens_per_second(self) -> Band | None:
        """None where the disk's speed isn't known."""
        if self.disk_seconds is None:
            return None
        worst, best = self.disk_seconds
        return Band(1 / (self.step_seconds + worst), 1 / max(self.step_seconds, best))

    @property
    def bound(self) -> str | None:
        """What decides the best of the band; None where the disk's speed isn't known."""
        if self.disk_seconds is None:
            return None
        return "disk" if self.disk_seconds.best > self.step_seconds else "computing"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "budget_bytes": self.plan.budget_bytes,
            "experts_held": self.plan.slots,
            "step_experts": self.plan.step_experts,
            "context": self.plan.context,
            "experts_per_1000_tokens": 1000 * self.plan.token_bytes / self.plan.slot_nbytes,
            "hit_share": list(self.hits),
            "loads_per_token": list(self.loads),
            "bytes_per_token": list(self.nbytes),
            "tokens_per_second": None if self.tokens_per_second is None else list(self.tokens_per_second),
            "bound": self.bound,
        }


def forecast(plan: Plan, tier: Tier, step_seconds: float, bytes_per_second: float | None) -> Forecast:
    """What a plan of the tier gives."""
    layers = plan.step_experts // tier.k
    hits = (1.0, 1.0) if plan.full else locality(tier).hit_share(plan.slots / layers, tier)
    return Forecast(plan, step_seconds, bytes_per_second, Band(*hits))


def smallest_budget(plan_for: Callable[[int, int], Plan]) -> int:
    """The least budget, in whole MiB, that `plan_for(budget_bytes, memory_bytes)` takes where there is memory enough."""

    def works(mib: int) -> bool:
        try:
            plan_for(mib * MIB, MOST)
        except Edge0Error:
            return False
        return True

    low, high = 0, 1  # low is too little
    while not works(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return high * MIB


def most_context(plan_for: Callable[[int], Plan], limit: int) -> int:
    """The longest context up to `limit` beside which `plan_for(context)` holds one token's experts; 0: none.

    In steps of those by which the caches grow.
    """

    def fits(steps: int) -> bool:
        try:
            plan = plan_for(min(steps * KV_STEP, limit))
        except Edge0Error:
            return False
        return plan.slots >= plan.step_experts

    low, high = 0, -(-limit // KV_STEP) + 1  # high is too long
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return min(low * KV_STEP, limit)
