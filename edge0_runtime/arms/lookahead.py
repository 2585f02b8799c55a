"""lookahead: own gates; read ahead is what a layer's gate would choose from the input of the layer below."""

from __future__ import annotations

import mlx.core as mx

from edge0_runtime.arms import Arm
from edge0_runtime.gates import Gate, one_token
from edge0_runtime.routing import Routing
from edge0_runtime.step import Step


class Lookahead(Arm):
    """The residual stream changes little from layer to layer, so the next gate's view of this input is a good guess.

    It is made lazily, and evaluated with the layer's own routing, which its experts' call has to wait for anyway.
    """

    def route(self, step: Step, gate: Gate, x: mx.array) -> Routing:
        """The gate's own routing; for one token, also what the next layer's gate makes of x, into `expected`."""
        own, above = gate.own(x), gate.layer + 1
        if step.waits and one_token(x) and above in self.parts.gates and above not in step.foreseen:
            next_gate = self.parts.gates[above]
            step.expected[above] = next_gate.choice(next_gate.own(x))
        return own
