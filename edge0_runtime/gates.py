"""The gates of a served network: a layer's own, or a head's prediction in its place (docs/method.md 1.2, 1.3).

mlx-lm's blocks come in two kinds. In softmax-top-k families the gate is a linear layer and the block chooses by its
logits; in sigmoid-group families the gate itself returns experts and weights. Either way one submodule is replaced, and
what is predicted is what is routed. T tokens, D hidden size, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from edge0_runtime.contract.tier import Tier
from edge0_runtime.prerouter import Predictor
from edge0_runtime.routing import RoutingLog, route, scores, within_mass


def prerouted(block: Any, layer: int, tier: Tier, log: RoutingLog) -> None:
    """Wrap the gate of a MoE block, which takes the tier's K from now on.

    The gate is the layer's own, and logged, until the wrapper is told what to `follow`.
    """
    chooses = tier.layout.expert_bias is not None
    chooser = block.gate if chooses else block
    chooser.top_k = tier.k
    # docs/method.md 1.2; a config may lack the field. For a wider mass the gate narrows the softmax itself: `within_mass`.
    chooser.norm_topk_prob = tier.router.renormalise and not tier.router.mass_k
    block.gate = (PreroutedChoice if chooses else PreroutedGate)(block.gate, layer, tier, log)


class PreroutedGate(nn.Module):
    """Drop-in for a softmax-top-k block's `mlp.gate`: x [..., T, D] -> router logits [..., T, E]."""

    def __init__(self, inner: nn.Module, layer: int, tier: Tier, log: RoutingLog) -> None:
        super().__init__()
        self.inner = inner
        self._layer, self._tier, self._log = layer, tier, log
        self._predictor: Predictor | None = None
        self._above: Callable[[mx.array], mx.array] | None = None

    def follow(self, predictor: Predictor | None) -> None:
        """Be routed by this from now on; None is the layer's own gate."""
        self._predictor = predictor

    def look_ahead(self, above: Callable[[mx.array], mx.array] | None) -> None:
        """When one token is routed by own gates, say what the next layer's would choose by its `own_choice`."""
        self._above = above

    def own_choice(self, x: mx.array) -> mx.array:
        """[<=2, K], what the layer's own gate chooses at the last two tokens of x [..., T, D]."""
        return self._choice(self.inner(x))

    def __call__(self, x: mx.array) -> Any:
        layer, predictor = self._layer, self._predictor
        one_token = x.size == x.shape[-1]
        if predictor is not None:
            predictor.observe_input(layer, x.reshape(-1, x.shape[-1]))
        if predictor is None or not predictor.predicts(layer):
            own = self.own(x)
            if predictor is not None and predictor.wants_own_choice(layer):
                predictor.observe_own_choice(layer, self._choice(own))
            if self._above and one_token and not (predictor and predictor.predicts(layer + 1)):
                self._log.expected[layer + 1] = self._above(x)
            return self._narrowed(own)
        if predictor.wants_own_choice(layer):
            predictor.observe_own_choice(layer, self.own_choice(x))
        if not one_token:
            raise RuntimeError(f"layer {layer}: a predicted step has one token, got {x.shape[:-1]}")
        return self._routing(predictor.prediction(layer), x)

    def own(self, x: mx.array) -> Any:
        """What the layer's own gate says, logged."""
        own = self.inner(x)
        self._log.scores[self._layer] = self._own_scores(x, own)
        return own

    def _own_scores(self, x: mx.array, own: Any) -> mx.array:
        """[E], what the own gate chooses by at the last token. Lazy: costs nothing unless someone looks."""
        return scores(self._tier.router, own.reshape(-1, own.shape[-1])[-1])

    def _choice(self, own: Any) -> mx.array:
        """As `own_choice`, of what the gate gave."""
        return route(self._tier.router, own.reshape(-1, own.shape[-1])[-2:], self._tier.k)[0]

    def _narrowed(self, own: Any) -> Any:
        """What the block gets of its own gate."""
        return within_mass(self._tier.router, own)

    def _routing(self, prediction: Any, x: mx.array) -> Any:
        """What the block gets of a prediction: E router logits, or what this very gate said of another input."""
        self._log.scores[self._layer] = scores(self._tier.router, prediction.reshape(-1))
        return within_mass(self._tier.router, prediction.reshape(*x.shape[:-1], -1).astype(x.dtype))


class PreroutedChoice(PreroutedGate):
    """Drop-in for a sigmoid-group block's `mlp.gate`: x [..., T, D] -> (experts [..., T, K], their weights)."""

    def _own_scores(self, x: mx.array, own: Any) -> mx.array:
        x_D = x.reshape(-1, x.shape[-1])[-1].astype(mx.float32)
        bias_E = self.inner[self._tier.layout.expert_bias]
        return scores(self._tier.router, self.inner.weight.astype(mx.float32) @ x_D, bias_E)

    def _narrowed(self, own: Any) -> Any:
        return own

    def _choice(self, own: Any) -> mx.array:
        return own[0].reshape(-1, self._tier.k)[-2:]

    def _routing(self, prediction: Any, x: mx.array) -> Any:
        if not isinstance(prediction, tuple):  # a head's logits
            self._log.scores[self._layer] = scores(self._tier.router, prediction)
            prediction = route(self._tier.router, prediction, self._tier.k)
        return tuple(part.reshape(*x.shape[:-1], -1) for part in prediction)
