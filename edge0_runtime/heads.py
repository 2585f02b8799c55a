"""Prerouter heads in MLX (docs/method.md 1.3): all of a tier's, stacked, in one go. They know neither step nor timeline.

Shapes: O owners (those whose next layer is predicted first), E experts, D hidden size, W head width, I head input.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from edge0_runtime.contract.tier import TOKEN_NORM_EPS, Tier


class Heads:
    """logits = fc2(gelu(fc1(x))) + linear_init(x), for every owner.

    Attributes:
        owners: in the order of the stacks: the owners of the tier's consumers, then those whose output routes nothing.
        dtype: what they compute in.
    """

    def __init__(self, tier: Tier, tensors: Mapping[str, np.ndarray], dtype: mx.Dtype) -> None:
        """`tensors` is the content of the prerouter file."""
        others = (owner for owner in tier.owners if owner + 1 not in tier.consumers)
        self.owners = (*(layer - 1 for layer in tier.consumers), *others)
        self.dtype = dtype
        self._tier = tier
        self._fc1_OIW = self._stack(tensors, "fc1")
        self._fc2_OWE = self._stack(tensors, "fc2")
        self._linear_init_OIE = self._stack(tensors, "linear_init")
        mx.eval(self._fc1_OIW, self._fc2_OWE, self._linear_init_OIE)

    def _stack(self, tensors: Mapping[str, np.ndarray], part: str) -> mx.array:
        stacked = np.stack([tensors[f"layers.{n}.{part}.weight"].T for n in self.owners])
        return mx.array(stacked).astype(self.dtype)

    @property
    def nbytes(self) -> int:
        """Memory that the heads take."""
        return sum(part.nbytes for part in (self._fc1_OIW, self._fc2_OWE, self._linear_init_OIE))

    def __call__(
        self, hidden_OD: mx.array, current_OE: mx.array, previous_OE: mx.array, embedding_D: mx.array
    ) -> mx.array:
        """Router logits [O, E] of the next layers at the next token.

        Args:
            hidden_OD: the owners' MoE inputs at this token. current_OE, previous_OE: their routing at this token and the one
                before, as rows of K ones.
            embedding_D: the base's embedding of the next token; only token-aware heads look at it.
        """
        seen = [hidden_OD, current_OE, previous_OE]
        if self._tier.token_aware:
            token_D = _rms(embedding_D).astype(self.dtype)
            seen.append(mx.broadcast_to(token_D, (len(self.owners), *token_D.shape)))
        x_O1I = mx.concatenate(seen, axis=-1)[:, None, :]
        hidden_O1W = nn.gelu(x_O1I @ self._fc1_OIW)  # the exact (erf) GELU
        return (hidden_O1W @ self._fc2_OWE + x_O1I @ self._linear_init_OIE).squeeze(1)

    def multi_hot(self, indices_OTK: mx.array) -> mx.array:
        """Experts as rows of K ones: [O, T, E]."""
        zeros_OTE = mx.zeros((*indices_OTK.shape[:-1], self._tier.num_experts), self.dtype)
        return mx.put_along_axis(zeros_OTE, indices_OTK, mx.array(1.0, self.dtype), axis=-1)


def _rms(embedding_D: mx.array) -> mx.array:
    """The token feature (`Tier.token_aware`), in float32."""
    embedding_D = embedding_D.astype(mx.float32)
    return embedding_D * mx.rsqrt(mx.mean(mx.square(embedding_D)) + TOKEN_NORM_EPS)
