"""Prerouter heads in MLX (docs/method.md 1.3): all of a tier's, stacked, in one go. They know neither step nor timeline.

They compute in float32 whatever the model computes in, as they were trained: a logit rounded to less chooses other experts.

One function a kind of `contract/heads.py`, the twin of torch's module. Shapes: O owners (those whose next layer is predicted
first), E experts, D hidden size, W head width, F head input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from edge0_runtime.contract.heads import HEAD_INPUTS, TOKEN_NORM_EPS
from edge0_runtime.contract.tier import Tier, head_key

Parts = Mapping[str, mx.array]
"""{part: its weights of all owners, transposed: [O, in, out]}."""


def mlp(parts: Parts, x_O1F: mx.array) -> mx.array:
    """fc2(gelu(fc1(x))) + linear_init(x): [O, 1, E]. The GELU is the exact (erf) one."""
    hidden_O1W = nn.gelu(x_O1F @ parts["fc1"])
    return hidden_O1W @ parts["fc2"] + x_O1F @ parts["linear_init"]


EVERY = slice(None)
KINDS: dict[str, Callable[[Parts, mx.array], mx.array]] = {"mlp": mlp}
"""By the names of `HEAD_KINDS`."""


def unit_rms(embedding_D: mx.array) -> mx.array:
    """[D], in float32."""
    embedding_D = embedding_D.astype(mx.float32)
    return embedding_D * mx.rsqrt(mx.mean(mx.square(embedding_D)) + TOKEN_NORM_EPS)


class Heads:
    """The heads of a tier.

    Attributes:
        owners: in the order of the stacks: the owners of the tier's consumers, then those whose output routes nothing.
        packed: they are kept in the file's F16, half the memory, and each is cast when it computes.
    """

    def __init__(self, tier: Tier, tensors: Mapping[str, np.ndarray], *, packed: bool = False) -> None:
        """`tensors` is the content of the prerouter file."""
        others = (owner for owner in tier.owners if owner + 1 not in tier.consumers)
        self.owners = (*(layer - 1 for layer in tier.consumers), *others)
        self._tier = tier
        self._parts = {part: self._stack(tensors, part) for part in tier.head_parts}
        self.packed = packed
        mx.eval(self._parts)
        if not packed:
            self.widen()

    def _stack(self, tensors: Mapping[str, np.ndarray], part: str) -> mx.array:
        return mx.array(np.stack([tensors[head_key(owner, part)].T for owner in self.owners]))

    def widen(self) -> None:
        """Cast all of them to float32 once instead of at every step."""
        self.packed = False
        self._parts = {name: part.astype(mx.float32) for name, part in self._parts.items()}
        mx.eval(self._parts)

    @property
    def nbytes(self) -> int:
        """Memory that the heads take."""
        return sum(part.nbytes for part in self._parts.values())

    def __call__(self, before: Mapping[str, mx.array], embedding_D: mx.array | None, rows: slice = EVERY) -> mx.array:
        """Router logits [O, E] of the next layers at the next token, float32.

        Args:
            before: by the names of `HEAD_INPUTS`, what is of this token: hidden [O, D], routing and previous [O, E]; float32.
            embedding_D: the base's embedding of the next token; only heads that see the token look at it.
            rows: only these heads, O of them; each says the same bits as among all.
        """
        parts = {name: part[rows] for name, part in self._parts.items()}
        if not self.packed:
            return self._logits(parts, before, embedding_D)
        # One after the other: float32 copies of several at the same time would take more than is saved.
        said: list[mx.array] = []
        for row in range(len(before["hidden"])):
            one = slice(row, row + 1)
            own = [part[one] for part in parts.values()]
            own = mx.depends(own, said[-1:]) if said else own
            inputs = {name: value[one] for name, value in before.items()}
            said.append(self._logits(dict(zip(parts, own, strict=True)), inputs, embedding_D))
        return mx.concatenate(said)

    def _logits(self, parts: Parts, before: Mapping[str, mx.array], embedding_D: mx.array | None) -> mx.array:
        names, heads = self._tier.head_inputs, len(before["hidden"])
        x_OF = [before[name] if HEAD_INPUTS[name].of == "before" else self._token(embedding_D, heads) for name in names]
        x_O1F = mx.concatenate(x_OF, axis=-1)[:, None, :]
        return KINDS[self._tier.head](parts, x_O1F).squeeze(1)

    def _token(self, embedding_D: mx.array | None, heads: int) -> mx.array:
        """The input `token`, the same for all heads: [O, D]."""
        assert embedding_D is not None
        token_D = unit_rms(embedding_D)
        return mx.broadcast_to(token_D, (heads, *token_D.shape))

    def multi_hot(self, indices_OTK: mx.array) -> mx.array:
        """Experts as rows of K ones: [O, T, E]."""
        zeros_OTE = mx.zeros((*indices_OTK.shape[:-1], self._tier.num_experts))
        return mx.put_along_axis(zeros_OTE, indices_OTK, mx.array(1.0), axis=-1)
