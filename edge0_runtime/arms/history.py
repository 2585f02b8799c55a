"""history: own gates; the last token's experts are read again ahead, as far as they are gone."""

from __future__ import annotations

from edge0_runtime.arms import Arm
from edge0_runtime.step import Step


class History(Arm):
    """A layer's next experts are taken to be its last ones; about a quarter are (docs/method.md 3.2)."""

    def hints(self, last: Step, coming: Step) -> None:
        """Want what the last token's step ran, layer by layer: no prediction, so nothing is staged or judged."""
        coming.want(sorted(last.ran), last.executed())
