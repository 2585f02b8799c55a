"""oracle: own gates; replays what it has seen, and so knows the next token's experts before the step begins.

The bound of what reading one token ahead can give on a disk: every layer's next experts are asked for as soon as it has its own
of this step, none in vain, and no layer waits for its router. It learns in a first run over the same tokens, in which it is
on_demand; `bench --arms` gives every arm such a run.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from edge0_runtime.arms import Arm, Parts
from edge0_runtime.step import Step

MOST_STEPS = 2**16  # that are remembered; 20 MB for 40 layers of 4 experts


class Oracle(Arm):
    """The trace is keyed by all tokens so far, so that it is right for every continuation of a prompt."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._seen: dict[int, np.ndarray] = {}  # trail -> [MoE layers, K]
        self._following: dict[int, int] = {}  # trail -> the one that came after it the last time

    def hints(self, last: Step, coming: Step) -> None:
        """Remember the experts of the step just evaluated; stage the coming one's if its trail was seen before."""
        if last.trail is None or coming.trail is None:  # a step was run without a flush
            return
        self._seen[last.trail] = last.executed().astype(np.int16)
        self._following[last.trail] = coming.trail
        if len(self._seen) > MOST_STEPS:
            oldest = next(iter(self._seen))
            del self._seen[oldest], self._following[oldest]
        if coming.trail in self._seen:
            coming.stage(sorted(last.ran), self._seen[coming.trail].astype(np.int64))

    def look_ahead(self, step: Step, layer: int) -> tuple[Sequence[int], mx.array] | None:
        """By the token that came next the last time; what `hints` stages goes by the one that comes."""
        following = None if step.trail is None else self._following.get(step.trail)
        experts_LK = None if following is None else self._seen.get(following)
        if experts_LK is None:
            return None
        row = sorted(self.parts.gates).index(layer)
        return [layer], mx.array(experts_LK[row : row + 1])
