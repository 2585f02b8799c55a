"""on_demand: every layer's own gate; experts are read when it has chosen. The reference."""

from __future__ import annotations

from edge0_runtime.arms import Arm


class OnDemand(Arm):
    """Nothing is known ahead."""
