"""same_token: layer N+1 is routed by its own gate applied to layer N's input, one layer ahead in the same token.

The manner of Pre-gated MoE (arXiv 2308.12066), without its training; another model than the one on its own gates.
"""

from __future__ import annotations

from typing import ClassVar

import mlx.core as mx
import numpy as np

from edge0_runtime.arms import Arm
from edge0_runtime.gates import Gate
from edge0_runtime.routing import Routing
from edge0_runtime.step import Step


class SameToken(Arm):
    """The tier's consumers are routed so in decode steps; everything else by its own gate."""

    exact: ClassVar[bool] = False

    def route(self, step: Step, gate: Gate, x: mx.array) -> Routing:
        """What the layer below left in `foreseen`, else the own gate; first the layer above is routed and staged, after x."""
        above = gate.layer + 1
        if step.decoding and above in self.parts.tier.consumers:
            # Before this layer computes: its bytes and the next one's are then read together.
            next_gate = self.parts.gates[above]
            routing = step.foreseen[above] = next_gate.own(x.reshape(-1, x.shape[-1])[-1:])
            experts_1K = next_gate.block_choice(routing)
            mx.eval(experts_1K)
            step.stage([above], np.array(experts_1K))
        return step.foreseen.get(gate.layer) or gate.own(x)
