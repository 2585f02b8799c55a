"""Ways to serve the same model, to be measured against each other (docs/method.md 3.2).

* prerouter: heads route the predicted layers one token ahead, and their experts are read meanwhile; the other layers' are
  read as in lookahead. The product.
* on_demand: every layer's own gate; experts are read when it has chosen.
* history: own gates; the last token's experts are read again ahead, as far as they are gone.
* lookahead: own gates; read ahead is what a layer's gate would choose from the input of the layer below.
* same_token: layer N+1 is routed by its own gate applied to layer N's input, one layer ahead in the same token
  (the manner of Pre-gated MoE, arXiv 2308.12066, without its training).
* resident: plain mlx-lm, all experts in memory.

on_demand, history, lookahead and resident compute the same; prerouter and same_token are other models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from edge0_runtime.contract.tier import Tier
from edge0_runtime.routing import block_choice


class SameToken:
    """Routes the tier's consumers like a `Prerouter`, but from the layer below in the same decode step.

    Attributes:
        predicted_steps: decode steps since construction.
    """

    def __init__(
        self,
        tier: Tier,
        gates: Mapping[int, Callable[[mx.array], Any]],
        stage: Callable[[list[int], np.ndarray], None],
    ) -> None:
        """`gates` are the consumers' own; `stage` has a layer's experts read."""
        self._tier = tier
        self._gates = gates
        self._stage = stage
        self.predicted_steps = 0
        self.reset()

    def reset(self) -> None:
        """A new request begins."""
        self._decoding = False
        self._own: dict[int, Any] = {}  # what the gate of a layer above said

    def begin_prefill(self) -> None:
        """The next forward pass processes a chunk of the prompt, routed by the layers' own gates."""
        self._decoding = False

    def begin_decode(self, step: int) -> None:
        """The next forward pass processes a generated token."""
        self._decoding = True
        self.predicted_steps += 1

    def advance(self, executed: Mapping[int, np.ndarray | mx.array]) -> None:
        """Nothing is kept from one token to the next."""
        self._own.clear()

    def predict(self, embedding_D: mx.array) -> None:
        """Nothing is known before the step."""

    def predicts(self, layer: int) -> bool:
        """Whether `layer` is routed from the layer below in the running forward pass."""
        return self._decoding and layer in self._tier.consumers

    def prediction(self, layer: int) -> Any:
        """What the gate of `layer` said in the running step: router logits [1, E], or experts and weights [1, K]."""
        return self._own[layer]

    def wants_own_choice(self, layer: int) -> bool:
        """Never: there are no heads."""
        return False

    def observe_own_choice(self, layer: int, choice: mx.array) -> None:
        """Not wanted."""

    def observe_input(self, layer: int, x_TD: mx.array) -> None:
        """Route the layer above and have its experts read, before this one computes."""
        above = layer + 1
        if not self.predicts(above):
            return
        own = self._own[above] = self._gates[above](x_TD[-1:])
        if isinstance(own, tuple):  # a gate that chooses itself
            choice_1K = own[0]
        else:
            choice_1K = block_choice(self._tier.router, own, self._tier.k, x_TD.dtype)
        mx.eval(choice_1K)
        self._stage([above], np.array(choice_1K))
