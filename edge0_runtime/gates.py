"""The gates of a served network: they ask the arm what routes their layer (docs/method.md 1.2, 1.3).

mlx-lm's blocks come in two kinds. In softmax-top-k families the gate is a linear layer and the block chooses by its
logits; in sigmoid-group families the gate itself returns experts and weights. Either way one submodule is replaced, and
what the arm says is what is routed. A layer's own gate speaks in the model's dtype, as in the base; a prediction stays in
float32 until experts and weights are chosen, as in training. T tokens, D hidden size, E experts, K experts per token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from edge0_runtime.contract.tier import Tier
from edge0_runtime.routing import Routing, block_choice, route, scores, within_mass
from edge0_runtime.step import Running


class Gate(nn.Module, ABC):
    """Drop-in for a block's `mlp.gate`.

    Attributes:
        layer: whose.
    """

    def __init__(self, inner: nn.Module, layer: int, tier: Tier, running: Running) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner = inner
        self.layer = layer
        self._tier, self._running = tier, running

    def __call__(self, x: mx.array) -> Any:
        """What the block takes from its gate, for x [..., T, D]."""
        step = self._running.step
        assert step.route is not None  # a step that runs has its arm
        routing = step.routings[self.layer] = step.route(step, self, x)
        return self._for_block(routing, x)

    @abstractmethod
    def own(self, x: mx.array) -> Routing:
        """The layer's own routing of x [..., T, D]."""

    @abstractmethod
    def choice(self, own: Routing) -> mx.array:
        """[<=2, K], the experts of an own routing at the last two tokens."""

    @abstractmethod
    def block_choice(self, own: Routing) -> mx.array:
        """[T, K], the very experts that the block takes by an own routing."""

    @abstractmethod
    def _for_block(self, routing: Routing, x: mx.array) -> Any: ...


class LogitGate(Gate):
    """Of a softmax-top-k block: x [..., T, D] -> router logits [..., T, E]."""

    def own(self, x: mx.array) -> Routing:
        """The linear layer's logits [..., T, E]; the block chooses by them."""
        logits = self.inner(x)
        if not one_token(x):
            return Routing(logits)
        return Routing(logits, scores=lambda: scores(self._tier.router, logits.reshape(-1)))

    def choice(self, own: Routing) -> mx.array:
        """Resolved by `route`, in fp32: a feature or a hint, which may differ from the block at a near-tie."""
        assert own.logits_TE is not None
        return route(self._tier.router, own.logits_TE.reshape(-1, own.logits_TE.shape[-1])[-2:], self._tier.k)[0]

    def block_choice(self, own: Routing) -> mx.array:
        """Resolved by the block's own calls, so that it holds at near-ties too."""
        assert own.logits_TE is not None
        return block_choice(self._tier.router, own.logits_TE, self._tier.k)

    def _for_block(self, routing: Routing, x: mx.array) -> mx.array:
        logits = routing.logits_TE
        assert logits is not None
        return within_mass(self._tier.router, logits.reshape(*x.shape[:-1], self._tier.num_experts))


class ChoiceGate(Gate):
    """Of a sigmoid-group block: x [..., T, D] -> (experts [..., T, K], their weights)."""

    def own(self, x: mx.array) -> Routing:
        """mlx-lm's gate as it is; its scores are computed again, with its bias, only when somebody looks."""
        experts, weights = self.inner(x)
        if not one_token(x):
            return Routing(experts_TK=experts, weights_TK=weights)

        def chosen_by() -> mx.array:
            logits_E = self.inner.weight.astype(mx.float32) @ x.reshape(-1).astype(mx.float32)
            return scores(self._tier.router, logits_E, self.inner[self._tier.layout.expert_bias])

        return Routing(experts_TK=experts, weights_TK=weights, scores=chosen_by)

    def choice(self, own: Routing) -> mx.array:
        """The gate has chosen already."""
        assert own.experts_TK is not None
        return own.experts_TK.reshape(-1, self._tier.k)[-2:]

    def block_choice(self, own: Routing) -> mx.array:
        """What the gate gave is what the block takes."""
        assert own.experts_TK is not None
        return own.experts_TK

    def _for_block(self, routing: Routing, x: mx.array) -> tuple[mx.array, mx.array]:
        assert routing.experts_TK is not None and routing.weights_TK is not None
        shape = (*x.shape[:-1], self._tier.k)
        return routing.experts_TK.reshape(shape), routing.weights_TK.reshape(shape)


def wrap_gate(block: Any, layer: int, tier: Tier, running: Running) -> Gate:
    """Replace the gate of a MoE block, which takes the tier's K from now on; returns the wrapper."""
    chooses = tier.layout.expert_bias is not None
    chooser = block.gate if chooses else block
    chooser.top_k = tier.k
    # docs/method.md 1.2; a config may lack the field. For a wider mass the gate narrows the softmax itself: `within_mass`.
    chooser.norm_topk_prob = tier.router.renormalise and not tier.router.mass_k
    gate = (ChoiceGate if chooses else LogitGate)(block.gate, layer, tier, running)
    block.gate = gate
    block.__class__ = _keeping_dtype(type(block))
    return gate


def _keeping_dtype(block: type[nn.Module]) -> type[nn.Module]:
    """That class of block, its output in the dtype of its input: the float32 weights of a prediction mix in float32."""

    class Block(block):  # type: ignore[misc,valid-type]  # which class it is, the family says
        def __call__(self, x: mx.array) -> mx.array:
            output: mx.array = super().__call__(x)
            return output.astype(x.dtype)

    return Block


def one_token(x: mx.array) -> bool:
    """Whether x [..., T, D] has T = 1."""
    return x.size == x.shape[-1]
