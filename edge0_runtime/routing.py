"""From router logits to experts and mixing weights (docs/method.md 1.2): the MLX twin of training's torch.

softmax-top-k blocks of mlx-lm do this themselves on whatever their gate returns; `route` serves where a block
can't: the gate's own choice beside an executed prediction (`feature_topk: teacher`). `RoutingLog` keeps what
was chosen. Shapes: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from edge0_runtime.contract.tier import Router


class RoutingLog:
    """What the last forward pass routed to.

    Attributes:
        executed: layer -> [T, K] expert indices, as the block chose them; lazy where nobody waited for them.
        logits: layer -> [E] router logits of the pass's last token that the block chose by, predicted or its
            own.
        dropped: routings since construction whose expert wasn't there to compute; anything but 0 is a bug.
    """

    def __init__(self) -> None:
        self.executed: dict[int, np.ndarray | mx.array] = {}
        self.logits: dict[int, mx.array] = {}
        self.dropped = 0

    def clear(self) -> None:
        """Forget the last pass; the count stays."""
        self.executed.clear()
        self.logits.clear()


def route(
    router: Router, logits_TE: mx.array, k: int, expert_bias_E: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Experts and weights of every token.

    Args:
        router: the tier's routing rule.
        logits_TE: router logits, any leading shape.
        k: experts per token.
        expert_bias_E: sigmoid_group only: added to the scores for the selection, not for the weights. A
            layer's own gate has one; a predicted routing has none.

    Returns:
        (indices_TK, weights_TK): K expert indices in no particular order, and their fp32 weights.
    """
    if router.kind == "softmax_topk":
        return _softmax_topk(router, logits_TE, k)
    return _sigmoid_group(router, logits_TE, k, expert_bias_E)


def _softmax_topk(router: Router, logits_TE: mx.array, k: int) -> tuple[mx.array, mx.array]:
    gates_TE = mx.softmax(logits_TE.astype(mx.float32), axis=-1)
    indices_TK = _topk(gates_TE, k)
    weights_TK = mx.take_along_axis(gates_TE, indices_TK, axis=-1)
    return indices_TK, router.scaling * weights_TK / weights_TK.sum(axis=-1, keepdims=True)


def _sigmoid_group(
    router: Router, logits_TE: mx.array, k: int, expert_bias_E: mx.array | None
) -> tuple[mx.array, mx.array]:
    scores_TE = mx.sigmoid(logits_TE.astype(mx.float32))
    choice_TE = scores_TE if expert_bias_E is None else scores_TE + expert_bias_E.astype(mx.float32)
    choice_TGM = mx.unflatten(choice_TE, -1, (router.n_group, -1))
    group_score_TG = mx.topk(choice_TGM, min(2, choice_TGM.shape[-1]), axis=-1).sum(axis=-1)
    kept_TG = _topk(group_score_TG, router.topk_group)
    keep_TG = mx.put_along_axis(mx.zeros_like(group_score_TG), kept_TG, mx.array(1.0), axis=-1)
    # -inf and not 0: a biased score may be negative, and an expert of a dropped group must never win over it.
    choice_TGM = mx.where(keep_TG[..., None] > 0, choice_TGM, -mx.inf)
    indices_TK = _topk(choice_TGM.flatten(-2), k)
    weights_TK = mx.take_along_axis(scores_TE, indices_TK, axis=-1)
    return indices_TK, router.scaling * weights_TK / (weights_TK.sum(axis=-1, keepdims=True) + 1e-20)


def block_choice(router: Router, logits_TE: mx.array, k: int, dtype: mx.Dtype) -> mx.array:
    """[T, K] experts that a block computing in `dtype` chooses by predicted logits, by the same calls as there.

    `route` and a block's own softmax differ in rounding where `dtype` isn't fp32, and with it at near-ties.
    """
    if router.kind == "softmax_topk":
        return _topk(mx.softmax(logits_TE.astype(dtype), axis=-1, precise=True), k)
    return route(router, logits_TE, k)[0]


def _topk(scores_TE: mx.array, k: int) -> mx.array:
    """Indices of the k largest. The same call as in mlx-lm's blocks, so that ties break the same way."""
    return mx.argpartition(scores_TE, kth=-k, axis=-1)[..., -k:]
