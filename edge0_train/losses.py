"""The losses, in float32; sums over tokens, never means: the loop divides by the global token count of the window.

Vocabulary losses take hidden states and the language-model head and work through `chunk` tokens at a time, recomputed in
backward, so that a (tokens x vocabulary) matrix never exists (at 248,320 rows and 4,096 tokens it would be 4 GB).
Shape letters: N valid tokens, H hidden, V vocabulary, S teacher's top-k, E experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from edge0_runtime.contract.tier import Router
from edge0_train.student.routing import multi_hot, select

HeadLoss = Callable[..., torch.Tensor]
"""(router, head's logits [N, E], true router's logits [N, E], K, its expert bias [E] or None) -> summed loss."""


# -- phase 1: heads ----------------------------------------------------------------------------------------------------


def head_kl(
    router: Router, head_NE: torch.Tensor, target_NE: torch.Tensor, k: int, bias_E: torch.Tensor | None = None
) -> torch.Tensor:
    """Summed divergence of the head's routing distribution from the true router's (method.md 2.1).

    softmax router: KL(softmax(target) || softmax(head)). sigmoid router: for each expert the KL between the two Bernoulli
    distributions, summed over experts (BCE less its constant entropy, so that 0 means equal).
    """
    head_NE, target_NE = head_NE.float(), target_NE.float()
    if router.kind == "softmax_topk":
        return F.kl_div(head_NE.log_softmax(-1), target_NE.log_softmax(-1), log_target=True, reduction="sum")
    target_probability = target_NE.sigmoid()
    cross = F.binary_cross_entropy_with_logits(head_NE, target_probability, reduction="sum")
    entropy = F.binary_cross_entropy_with_logits(target_NE, target_probability, reduction="sum")
    return cross - entropy


def head_bce(
    router: Router, head_NE: torch.Tensor, target_NE: torch.Tensor, k: int, bias_E: torch.Tensor | None = None
) -> torch.Tensor:
    """Multi-label BCE on the K experts that the true router chooses (groups and bias included), over tokens and experts."""
    labels_NE = multi_hot(select(router, target_NE, k, bias_E), target_NE.shape[-1])
    return F.binary_cross_entropy_with_logits(head_NE.float(), labels_NE, reduction="sum")


HEAD_LOSSES: dict[str, HeadLoss] = {"kl": head_kl, "bce": head_bce}


# -- phases 2 and 3: vocabulary losses ---------------------------------------------------------------------------------


def cross_entropy(logits_NV: torch.Tensor, target_N: torch.Tensor) -> torch.Tensor:
    """Summed next-token cross-entropy."""
    return F.cross_entropy(logits_NV.float(), target_N, reduction="sum")


def topk_with_tail(logits_NV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The teacher's side of `reverse_kl`: (ids [N, S], log-probabilities [N, S], log of the tail's mass [N])."""
    logp_NV = logits_NV.float().log_softmax(-1)
    logp_NS, ids_NS = logp_NV.topk(min(k, logp_NV.shape[-1]), dim=-1)
    return ids_NS, logp_NS, log_tail(logp_NV, ids_NS)


def log_tail(logp_NV: torch.Tensor, ids_NS: torch.Tensor) -> torch.Tensor:
    """log(1 - sum_S p) [N], summed in the log domain over the tokens outside S; -inf when S is the whole vocabulary.

    With the full row at hand this needs neither a subtraction from 1 (which cancels when S holds nearly all mass) nor a
    clamp, and its gradient is the tail's own softmax.
    """
    return logp_NV.scatter(-1, ids_NS, float("-inf")).logsumexp(-1)


def reverse_kl(
    logits_NV: torch.Tensor, ids_NS: torch.Tensor, teacher_logp_NS: torch.Tensor, teacher_log_tail_N: torch.Tensor
) -> torch.Tensor:
    """Summed KL(student || teacher) on the teacher's top-k and one tail bucket (method.md 2.3).

    sum_{v in S} p(v) log(p(v) / q(v)) + p_tail log(p_tail / q_tail): the KL of a coarser vocabulary, hence >= 0, and the
    exact KL when S is the whole vocabulary (there is no tail then).
    """
    logp_NV = logits_NV.float().log_softmax(-1)
    logp_NS = logp_NV.gather(-1, ids_NS)
    divergence_N = (logp_NS.exp() * (logp_NS - teacher_logp_NS)).sum(-1)
    if ids_NS.shape[-1] < logits_NV.shape[-1]:
        tail_N = log_tail(logp_NV, ids_NS)
        divergence_N = divergence_N + tail_N.exp() * (tail_N - teacher_log_tail_N)
    return divergence_N.sum()


def chunked(
    loss: Callable[..., torch.Tensor],
    hidden_NH: torch.Tensor,
    lm_head: Callable[[torch.Tensor], torch.Tensor],
    *targets: torch.Tensor,
    chunk: int = 1024,
) -> torch.Tensor:
    """`loss(lm_head(hidden), *targets)` summed over chunks of tokens; each chunk's logits are recomputed in backward.

    Value and gradient equal the dense form's up to the order of the sum.
    """

    def one(hidden: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        return loss(lm_head(hidden), *parts)

    total = hidden_NH.new_zeros((), dtype=torch.float32)
    for start in range(0, hidden_NH.shape[0], chunk):
        parts = [target[start : start + chunk] for target in targets]
        total = total + checkpoint(one, hidden_NH[start : start + chunk], *parts, use_reentrant=False)
    return total
