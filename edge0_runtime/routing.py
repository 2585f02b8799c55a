"""From router logits to experts and mixing weights (docs/method.md 1.2): the MLX twin of training's torch.

mlx-lm's blocks and gates do this themselves for a layer's own routing; `route` serves where they can't: a prediction in a
sigmoid-group family, a gate's own choice beside an executed prediction (`feature_topk: teacher`). Shapes: T tokens, E experts,
K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from edge0_runtime.contract.tier import Router


@dataclass(frozen=True, slots=True)
class Routing:
    """What routes one layer (or, stacked, several) at T tokens; all arrays may be lazy.

    A block takes one of two things from its gate: logits, by which it chooses and weighs itself (softmax_topk), or experts and
    weights (sigmoid_group). What its kind takes is always there.

    Attributes:
        logits_TE: router logits, a head's or a gate's; None from a gate that gives experts and weights.
        experts_TK, weights_TK: the experts and their weights; None where nobody but the block has resolved them yet.
        scores: gives [E], what the last token's experts were chosen by, to look at afterwards (`choice_gap`); None in a pass
            of several tokens.
    """

    logits_TE: mx.array | None = None
    experts_TK: mx.array | None = None
    weights_TK: mx.array | None = None
    scores: Callable[[], mx.array] | None = None

    def arrays(self) -> list[mx.array]:
        """All that it consists of."""
        return [array for array in (self.logits_TE, self.experts_TK, self.weights_TK) if array is not None]


def predicted(router: Router, logits_TE: mx.array, k: int) -> Routing:
    """The routing that a head's logits are: resolved once, with the very experts that the block will take."""
    if router.kind == "softmax_topk":
        return Routing(logits_TE, block_choice(router, logits_TE, k))
    return Routing(logits_TE, *route(router, logits_TE, k))


def stack(rows: Sequence[Routing]) -> Routing:
    """Several layers' routings [1, E] as one [layers, E]."""

    def joined(arrays: list[mx.array | None]) -> mx.array | None:
        there = [array for array in arrays if array is not None]
        return mx.concatenate(there) if there else None

    return Routing(
        joined([each.logits_TE for each in rows]),
        joined([each.experts_TK for each in rows]),
        joined([each.weights_TK for each in rows]),
    )


def row(router: Router, stacked: Routing, index: int) -> Routing:
    """One layer's routing of a stack [layers, E]."""
    assert stacked.logits_TE is not None
    logits_E = stacked.logits_TE[index]

    def chosen_by() -> mx.array:
        return scores(router, logits_E)

    if stacked.weights_TK is None or stacked.experts_TK is None:
        return Routing(logits_E, scores=chosen_by)
    return Routing(logits_E, stacked.experts_TK[index], stacked.weights_TK[index], chosen_by)


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


def scores(router: Router, logits_TE: mx.array, expert_bias_E: mx.array | None = None) -> mx.array:
    """What experts are chosen by, fp32: the softmax over the experts, or each one's sigmoid plus its bias."""
    if router.kind == "softmax_topk":
        return mx.softmax(logits_TE.astype(mx.float32), axis=-1)
    scores_TE = mx.sigmoid(logits_TE.astype(mx.float32))
    return scores_TE if expert_bias_E is None else scores_TE + expert_bias_E.astype(mx.float32)


def _softmax_topk(router: Router, logits_TE: mx.array, k: int) -> tuple[mx.array, mx.array]:
    gates_TE = scores(router, logits_TE)
    indices_TK = _topk(gates_TE, k)
    weights_TK = mx.take_along_axis(gates_TE, indices_TK, axis=-1)
    if not router.renormalise and not router.mass_k:
        return indices_TK, router.scaling * weights_TK
    mass = mx.topk(gates_TE, router.mass_k, axis=-1) if router.mass_k else weights_TK
    return indices_TK, weights_TK / mass.sum(axis=-1, keepdims=True) * router.scaling


def within_mass(router: Router, logits_TE: mx.array) -> mx.array:
    """Logits of softmax_topk with `Router.mass_k`: -inf for all but the `mass_k` likeliest experts.

    A block that then does not renormalise, and so weighs by a plain softmax over all experts, divides by that mass.
    """
    if not router.mass_k:
        return logits_TE
    kept_TM = _topk(logits_TE, router.mass_k)
    outside_TE = mx.full(logits_TE.shape, -mx.inf, logits_TE.dtype)
    return mx.put_along_axis(outside_TE, kept_TM, mx.take_along_axis(logits_TE, kept_TM, axis=-1), axis=-1)


def _sigmoid_group(
    router: Router, logits_TE: mx.array, k: int, expert_bias_E: mx.array | None
) -> tuple[mx.array, mx.array]:
    choice_TE = scores(router, logits_TE, expert_bias_E)
    choice_TGM = mx.unflatten(choice_TE, -1, (router.n_group, -1))
    group_score_TG = mx.topk(choice_TGM, min(2, choice_TGM.shape[-1]), axis=-1).sum(axis=-1)
    kept_TG = _topk(group_score_TG, router.topk_group)
    keep_TG = mx.put_along_axis(mx.zeros_like(group_score_TG), kept_TG, mx.array(1.0), axis=-1)
    # -inf and not 0: a biased score may be negative, and an expert of a dropped group must never win over it.
    choice_TGM = mx.where(keep_TG[..., None] > 0, choice_TGM, -mx.inf)
    indices_TK = _topk(choice_TGM.flatten(-2), k)
    weights_TK = mx.take_along_axis(scores(router, logits_TE), indices_TK, axis=-1)
    return indices_TK, weights_TK / (weights_TK.sum(axis=-1, keepdims=True) + 1e-20) * router.scaling


def choice_gap(router: Router, scores_E: np.ndarray, chosen: Collection[int]) -> float:
    """How far router scores are from choosing exactly the experts `chosen`: the largest lead that one left out has.

    Zero or less if they do choose them; a tiny number is a near-tie, between experts or between expert groups.
    """
    size = len(scores_E) // router.n_group
    group_G = np.sort(scores_E.reshape(router.n_group, size), axis=-1)[:, -2:].sum(-1)
    needed = {expert // size for expert in chosen}
    if len(needed) > router.topk_group:
        return float("inf")
    # Of the kept groups those that `chosen` lies in are given; the best others take the remaining places.
    ranked = sorted(range(router.n_group), key=lambda g: (g not in needed, -group_G[g]))
    kept, dropped = ranked[: router.topk_group], ranked[router.topk_group :]
    gaps = [max(group_G[g] for g in dropped) - min(group_G[g] for g in needed)] if dropped else []
    rivals = [scores_E[e] for g in kept for e in range(g * size, (g + 1) * size) if e not in chosen]
    gaps += [max(rivals) - min(scores_E[e] for e in chosen)] if rivals else []
    return float(max(gaps, default=0.0))


def block_choice(router: Router, logits_TE: mx.array, k: int) -> mx.array:
    """[T, K] experts that a block chooses by these very logits, by the same calls as there.

    A block's softmax has the dtype of the logits, `route` is in fp32: for logits in less they differ at near-ties.
    """
    if router.kind == "softmax_topk":
        return _topk(mx.softmax(within_mass(router, logits_TE), axis=-1, precise=True), k)
    return route(router, logits_TE, k)[0]


def _topk(scores_TE: mx.array, k: int) -> mx.array:
    """Indices of the k largest. The same call as in mlx-lm's blocks, so that ties break the same way."""
    return mx.argpartition(scores_TE, kth=-k, axis=-1)[..., -k:]
