"""resident: plain mlx-lm, all experts in memory."""

from __future__ import annotations

from typing import ClassVar

from edge0_runtime.arms import Arm


class Resident(Arm):
    """Nothing is ever read."""

    streams: ClassVar[bool] = False
