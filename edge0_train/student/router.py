"""Router mathematics in torch (docs/method.md 1.2): logits -> experts -> mixing weights, in float32.

Selecting and weighing are two functions because a recomputed forward (gradient checkpointing) must reuse the experts it
selected the first time: rounding may not flip a near-tie between the two.
"""

from __future__ import annotations

import torch

from edge0_runtime.contract.tier import Router


def scores(router: Router, logits_NE: torch.Tensor) -> torch.Tensor:
    """Router probabilities [N, E] in float32: softmax over the experts, or a sigmoid for each."""
    logits_NE = logits_NE.float()
    return logits_NE.softmax(-1) if router.kind == "softmax_topk" else logits_NE.sigmoid()


@torch.no_grad()
def select(router: Router, logits_NE: torch.Tensor, k: int, bias_E: torch.Tensor | None = None) -> torch.Tensor:
    """The k chosen experts of every token: int64 [N, k], in no particular order.

    `bias_E` is the sigmoid router's expert bias: it takes part in a layer's own selection, never in a predicted one.
    """
    choice_NE = scores(router, logits_NE)
    if bias_E is not None:
        choice_NE = choice_NE + bias_E.float()
    if router.kind == "sigmoid_group":
        grouped_NGe = choice_NE.unflatten(-1, (router.n_group, -1))
        group_score_NG = grouped_NGe.topk(2, dim=-1).values.sum(-1)
        kept_NG = torch.zeros_like(group_score_NG, dtype=torch.bool)
        kept_NG.scatter_(1, group_score_NG.topk(router.topk_group, dim=-1).indices, True)
        choice_NE = grouped_NGe.masked_fill(~kept_NG[..., None], float("-inf")).flatten(1)
    # transformers' order, since sums over the k depend on it in the last bit
    return choice_NE.topk(k, dim=-1, sorted=router.kind == "softmax_topk").indices


def weigh(router: Router, logits_NE: torch.Tensor, indices_NK: torch.Tensor) -> torch.Tensor:
    """Mixing weights of the chosen experts: float32 [N, K], times the router's scaling.

    They are renormalised over the K, over a wider mass (`Router.mass_k`), or not at all (`Router.renormalise`).
    """
    scores_NE = scores(router, logits_NE)
    chosen_NK = scores_NE.gather(-1, indices_NK)
    if not router.renormalise and not router.mass_k:
        return router.scaling * chosen_NK
    mass = scores_NE.topk(router.mass_k, dim=-1).values if router.mass_k else chosen_NK
    total_N1 = mass.sum(-1, keepdim=True)
    if router.kind == "sigmoid_group":
        total_N1 = total_N1 + 1e-20  # all sigmoids can underflow together; a softmax's top-k cannot
    return chosen_NK / total_N1 * router.scaling  # in this order, as both libraries do: bit for bit


def multi_hot(indices: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Routing as rows of K ones: float32 [..., E] from int64 [..., K]."""
    hot = torch.zeros(*indices.shape[:-1], num_experts, device=indices.device)
    return hot.scatter_(-1, indices, 1.0)
