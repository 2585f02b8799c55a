"""How many of a token's experts are still held from the tokens before: recorded by tier in `locality.yaml`.

A model without a record of its own is judged between two bounds: routing that repeats by chance alone, and routing that repeats
as the recorded tier's does, at as many slots for each of the K experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge0_runtime.contract.files import read_yaml
from edge0_runtime.contract.tier import Sticky, Tier

RECORDS = Path(__file__).with_name("locality.yaml")
DEFAULT = "nano"


@dataclass(frozen=True)
class Locality:
    """A record: misses a token and layer, {experts held a layer: misses}."""

    tier: str
    k: int
    sticky: Sticky
    misses: Mapping[int, float]

    def hit_share(self, slots: float, tier: Tier) -> tuple[float, float]:
        """(least, most) share of a token's experts that an LRU of `slots` a layer has; linear between what was recorded."""
        chance = min(1.0, slots / tier.num_experts)
        if slots < tier.k:  # all of them have gone when their layer's turn comes again
            return 0.0, 0.0
        sizes = [n / self.k for n in self.misses] + [tier.num_experts / tier.k]
        missed = [count / self.k for count in self.misses.values()] + [0.0]
        return chance, max(chance, 1 - float(np.interp(slots / tier.k, sizes, missed)))


def locality(tier: Tier) -> Locality:
    """The tier's own record, else nano's; of its stickiness, else of none (what is sticky repeats more); of the nearest K."""
    recorded = read_yaml(RECORDS, "install edge0 again")
    name = tier.name if tier.name in recorded else DEFAULT
    rows = [Locality(name, row["k"], Sticky(**row["sticky"]), row["misses"]) for row in recorded[name]]
    same = [row for row in rows if row.sticky == tier.router.sticky] or [row for row in rows if not row.sticky]
    return min(same, key=lambda row: abs(row.k - tier.k))
