"""The prerouter at serve time: which step predicts, from what, and what the gates see (docs/method.md 1.3, 1.4).

Owner N's head, evaluated on input t, gives the router logits of layer N+1 on input t+1; `gates.py` routes by them.

One request drives the state, in this order: `reset`; per prefill chunk `begin_prefill`, forward, `advance`;
per decode step `predict`, `begin_decode(step)`, forward, `advance`. `predict` evaluates all heads at once, as
soon as the token of the step is chosen: token-aware heads see it. Whether a forward pass is prefill or decode
is told, never guessed from its length: a prompt's last chunk may be one token.

Shapes: O owners (those whose next layer is predicted first), T tokens, K experts per token, E experts, D hidden size,
W head width, I = D + 2E head input (2D + 2E if token-aware).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from edge0_runtime.contract.heads import TOKEN_NORM_EPS
from edge0_runtime.contract.tier import Tier


class Predictor(Protocol):
    """What routes layers in place of their own gates; `Prerouter` says what each call means."""

    predicted_steps: int

    def reset(self) -> None: ...
    def begin_prefill(self) -> None: ...
    def begin_decode(self, step: int) -> None: ...
    def advance(self, executed: Mapping[int, np.ndarray | mx.array]) -> None: ...
    def predict(self, embedding_D: mx.array) -> mx.array | None: ...
    def predicts(self, layer: int) -> bool: ...
    def prediction(self, layer: int) -> Any: ...
    def wants_own_choice(self, layer: int) -> bool: ...
    def observe_input(self, layer: int, x_TD: mx.array) -> None: ...
    def observe_own_choice(self, layer: int, indices_TK: mx.array) -> None: ...


class Prerouter:
    """All heads of a tier, stacked, and the state of the request that is running.

    Attributes:
        guessed: layers that keep their own gate and have a head all the same (35b: the last one). What it predicts comes
            after the tier's consumers' and routes nothing, but is a good guess what to read.
        predicted_steps: decode steps routed by prediction since construction.
    """

    def __init__(self, tier: Tier, tensors: Mapping[str, np.ndarray], dtype: mx.Dtype) -> None:
        """`tensors` is the content of the prerouter file; the heads compute in `dtype`."""
        self.tier = tier
        self.guessed = tuple(n + 1 for n in tier.owners if n + 1 not in tier.consumers)
        self._owners = tuple(layer - 1 for layer in (*tier.consumers, *self.guessed))
        self.predicted_steps = 0
        self._dtype = dtype
        self._fc1_OIW = self._stack(tensors, "fc1")
        self._fc2_OWE = self._stack(tensors, "fc2")
        self._linear_init_OIE = self._stack(tensors, "linear_init")
        self._zeros_OE = mx.zeros((len(self._owners), tier.num_experts), dtype)
        mx.eval(self._fc1_OIW, self._fc2_OWE, self._linear_init_OIE, self._zeros_OE)
        self.reset()

    def _stack(self, tensors: Mapping[str, np.ndarray], part: str) -> mx.array:
        stacked = np.stack([tensors[f"layers.{n}.{part}.weight"].T for n in self._owners])
        return mx.array(stacked).astype(self._dtype)

    @property
    def nbytes(self) -> int:
        """Memory that the heads take."""
        return sum(part.nbytes for part in (self._fc1_OIW, self._fc2_OWE, self._linear_init_OIE, self._zeros_OE))

    # -- the timeline, driven by the request -----------------------------------------------------------------

    def reset(self) -> None:
        """Forget everything: a new request begins."""
        self._capturing = self._predicting = False
        self._hidden: dict[int, mx.array] = {}  # owner -> its last MoE input [D]
        self._own_choice: dict[int, mx.array] = {}  # owner -> its own gate's last choices [<=2, K] (teacher)
        self._current_OE = self._previous_OE = self._zeros_OE  # routing of the last captured input, and before
        self._pending_OE: mx.array | None = None  # logits for the next input

    def begin_prefill(self) -> None:
        """The next forward pass processes a chunk of the prompt."""
        # Under "gate" the first decode step has no history: what the prompt routed to is not kept.
        self._begin(capturing=self.tier.first_token == "predicted", predicting=False)

    def begin_decode(self, step: int) -> None:
        """The next forward pass processes the input of decode step `step`, from 0 (input P + step)."""
        self._begin(capturing=True, predicting=step > 0 or self.tier.first_token == "predicted")
        self.predicted_steps += self._predicting

    def _begin(self, capturing: bool, predicting: bool) -> None:
        self._capturing, self._predicting = capturing, predicting
        self._hidden, self._own_choice = {}, {}

    def advance(self, executed: Mapping[int, np.ndarray | mx.array]) -> None:
        """Take over the routing of the forward pass that was just built; `executed` is layer -> [T, K], maybe lazy."""
        if not self._capturing:
            return
        if self.tier.feature_topk == "executed":
            last_OTK = mx.stack([mx.array(executed[n][-2:]).astype(mx.uint32) for n in self._owners])
        else:
            last_OTK = mx.stack([self._own_choice[n] for n in self._owners])
        last_OTE = self._multi_hot(last_OTK)
        # A pass of one token continues the sequence: the input before it belongs to the pass before.
        self._previous_OE = last_OTE[:, -2] if last_OTE.shape[1] > 1 else self._current_OE
        self._current_OE = last_OTE[:, -1]

    def predict(self, embedding_D: mx.array) -> mx.array | None:
        """All heads in one go: logits [O, E] for the next input, to be evaluated by the caller.

        `embedding_D` is the base's embedding of that input; only token-aware heads look at it. None if the pass
        before captured nothing (prefill under "gate").
        """
        if not self._capturing:
            return None
        seen = [mx.stack([self._hidden[n] for n in self._owners]), self._current_OE, self._previous_OE]
        if self.tier.token_aware:
            token_D = _rms(embedding_D).astype(self._dtype)
            seen.append(mx.broadcast_to(token_D, (len(self._owners), *token_D.shape)))
        x_O1I = mx.concatenate(seen, axis=-1)[:, None, :]
        hidden_O1W = nn.gelu(x_O1I @ self._fc1_OIW)  # the exact (erf) GELU
        self._pending_OE = (hidden_O1W @ self._fc2_OWE + x_O1I @ self._linear_init_OIE).squeeze(1)
        return self._pending_OE

    def _multi_hot(self, indices_OTK: mx.array) -> mx.array:
        zeros_OTE = mx.zeros((*indices_OTK.shape[:-1], self.tier.num_experts), self._dtype)
        return mx.put_along_axis(zeros_OTE, indices_OTK, mx.array(1.0, self._dtype), axis=-1)

    # -- what the layers' gates ask --------------------------------------------------------------------------

    def predicts(self, layer: int) -> bool:
        """Whether `layer` is routed by prediction in the running forward pass."""
        return self._predicting and layer in self.tier.consumers

    def prediction(self, layer: int) -> mx.array:
        """Predicted router logits [E] of `layer` for the running decode step."""
        if self._pending_OE is None:
            raise RuntimeError(f"layer {layer}: a predicted step without predictions; predict() was not called")
        return self._pending_OE[self.tier.consumers.index(layer)]

    def wants_own_choice(self, layer: int) -> bool:
        """Whether the layer's own gate is a feature of its head in the running pass, whatever is executed."""
        return self._capturing and layer in self._owners and self.tier.feature_topk == "teacher"

    def observe_input(self, layer: int, x_TD: mx.array) -> None:
        """Capture a layer's MoE input, if it is an owner's in a pass that captures."""
        if self._capturing and layer in self._owners:
            self._hidden[layer] = x_TD[-1].astype(self._dtype)

    def observe_own_choice(self, layer: int, indices_TK: mx.array) -> None:
        """Take what a layer's own gate chooses at the last two tokens, if it is wanted, or at the only one."""
        self._own_choice[layer] = indices_TK


def _rms(embedding_D: mx.array) -> mx.array:
    """The token feature (`Tier.token_aware`), in float32."""
    embedding_D = embedding_D.astype(mx.float32)
    return embedding_D * mx.rsqrt(mx.mean(mx.square(embedding_D)) + TOKEN_NORM_EPS)
