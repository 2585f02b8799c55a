"""The losses, in float32; sums over tokens, never means: the loop divides by the global token count of the window.

Vocabulary losses take hidden states and the language-model head and work through `CHUNK` tokens at a time, recomputed in
backward, so that a (tokens x vocabulary) matrix never exists (at 248,320 rows and 4,096 tokens it would be 4 GB).

`HEAD_LOSSES` and `ON_POLICY_LOSSES` are what `heads.loss` and `on_policy.loss` can name. A new loss is a function here and its
entry there; no other file knows their names.
Shape letters: N valid tokens, H hidden, V vocabulary, S teacher's top-k, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import Router
from edge0_train.student.router import multi_hot, select

HeadLoss = Callable[..., torch.Tensor]
"""(router, head's logits [N, E], true router's logits [N, E], K, its expert bias [E] or None) -> summed loss."""

CHUNK = 1024
"""Tokens against the whole vocabulary at a time, wherever logits are made for many tokens."""


# -- phase 1: heads ----------------------------------------------------------------------------------------------------


SCORE_FLOOR = 1e-4
"""Biased scores are taken for probabilities; they may leave (0, 1)."""


def head_kl(
    router: Router, head_NE: torch.Tensor, target_NE: torch.Tensor, k: int, bias_E: torch.Tensor | None = None
) -> torch.Tensor:
    """Summed divergence of the head's routing distribution from the true router's (docs/method.md 2.1).

    softmax router: KL(softmax(target) || softmax(head)). sigmoid router: for each expert the KL between the two Bernoulli
    distributions, summed over experts (BCE less its constant entropy, so that 0 means equal). The layer's own gate chooses by
    score + expert bias, a prediction without a bias: the head is taught the biased score, so that it chooses the same set.
    """
    head_NE, target_NE = head_NE.float(), target_NE.float()
    if router.kind == "softmax_topk":
        return F.kl_div(head_NE.log_softmax(-1), target_NE.log_softmax(-1), log_target=True, reduction="sum")
    if bias_E is not None:
        target_NE = (target_NE.sigmoid() + bias_E.float()).clamp(SCORE_FLOOR, 1 - SCORE_FLOOR).logit()
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


MARGIN = 1.0
"""What `head_kl_margin` asks for between the two logits at the K boundary, in nats: odds of e to 1."""


def head_kl_margin(
    router: Router, head_NE: torch.Tensor, target_NE: torch.Tensor, k: int, bias_E: torch.Tensor | None = None
) -> torch.Tensor:
    """`head_kl` plus a hinge at the K boundary (docs/method.md 2.1), summed over tokens.

    head_kl + sum_n max(0, MARGIN - (h[n, a] - h[n, b])), where a is the true router's K-th expert (the last one that is
    routed to), b its (K+1)-th (the first one that is not) and h the head's logits. KL spreads its effort over the whole
    distribution; this term spends some where a swap changes the routed set. When every expert is served there is no boundary.
    """
    divergence = head_kl(router, head_NE, target_NE, k, bias_E)
    if k >= target_NE.shape[-1]:
        return divergence
    last_in_N1, first_out_N1 = (_ranked(router, target_NE, rank, bias_E) for rank in (k, k + 1))
    gap_N1 = head_NE.float().gather(-1, last_in_N1) - head_NE.float().gather(-1, first_out_N1)
    return divergence + (MARGIN - gap_N1).clamp_min(0).sum()


def _ranked(router: Router, logits_NE: torch.Tensor, rank: int, bias_E: torch.Tensor | None) -> torch.Tensor:
    """The router's rank-th choice (1: the best) of every token, int64 [N, 1]: what the rank-th place adds to the set."""
    experts = logits_NE.shape[-1]
    with_it, without = (multi_hot(select(router, logits_NE, k, bias_E), experts) for k in (rank, rank - 1))
    return (with_it - without).argmax(-1, keepdim=True)


HEAD_LOSSES: dict[str, HeadLoss] = {"kl": head_kl, "bce": head_bce, "kl_margin": head_kl_margin}
"""`heads.loss`."""


# -- phases 2 and 3: vocabulary losses ---------------------------------------------------------------------------------


def cross_entropy(logits_NV: torch.Tensor, target_N: torch.Tensor) -> torch.Tensor:
    """Summed next-token cross-entropy."""
    return F.cross_entropy(logits_NV.float(), target_N, reduction="sum")


def topk_with_tail(logits_NV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The teacher's side of the divergences below: (ids [N, S], log-probabilities [N, S], log of the tail's mass [N]).

    k = V is the exact divergence; raises Edge0Error for a larger k, which would be a misunderstanding.
    """
    if k > logits_NV.shape[-1]:
        raise Edge0Error(
            f"on_policy.top_k: {k} is larger than the vocabulary of {logits_NV.shape[-1]}; lower it (equal is the exact KL)"
        )
    logp_NV = logits_NV.float().log_softmax(-1)
    logp_NS, ids_NS = logp_NV.topk(k, dim=-1)
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
    """Summed KL(student || teacher) on the teacher's top-k and one tail bucket (docs/method.md 2.3).

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


def forward_kl(
    logits_NV: torch.Tensor, ids_NS: torch.Tensor, teacher_logp_NS: torch.Tensor, teacher_log_tail_N: torch.Tensor
) -> torch.Tensor:
    """Summed KL(teacher || student) on the same buckets as `reverse_kl`: a control.

    sum_{v in S} q(v) log(q(v) / p(v)) + q_tail log(q_tail / p_tail). It covers what the teacher might say, also where the
    student never goes; >= 0, and exact when S is the whole vocabulary.
    """
    logp_NV = logits_NV.float().log_softmax(-1)
    divergence_N = (teacher_logp_NS.exp() * (teacher_logp_NS - logp_NV.gather(-1, ids_NS))).sum(-1)
    if ids_NS.shape[-1] < logits_NV.shape[-1]:
        tail_N = log_tail(logp_NV, ids_NS)
        divergence_N = divergence_N + teacher_log_tail_N.exp() * (teacher_log_tail_N - tail_N)
    return divergence_N.sum()


def reverse_kl_no_tail(
    logits_NV: torch.Tensor, ids_NS: torch.Tensor, teacher_logp_NS: torch.Tensor, teacher_log_tail_N: torch.Tensor
) -> torch.Tensor:
    """`reverse_kl` without the tail bucket, sum_{v in S} p(v) log(p(v) / q(v)): a control, and biased.

    It is no divergence: it is negative where the student has less mass on S than the teacher, and mass that the student moves
    out of S costs nothing, so its minimum is not at p = q.
    """
    logp_NS = logits_NV.float().log_softmax(-1).gather(-1, ids_NS)
    return (logp_NS.exp() * (logp_NS - teacher_logp_NS)).sum()


def sampled_token(
    logits_NV: torch.Tensor, sampled_N: torch.Tensor, teacher_logp_sampled_N: torch.Tensor
) -> torch.Tensor:
    """Reverse KL estimated from the one token y ~ p that the student sampled: a control.

    With r = log p(y) - log q(y): the value is sum_n r, whose mean over y is KL(p || q) (single values may be negative); the
    gradient is sum_n sg(r) grad log p(y), whose mean over y is grad KL(p || q) because E[grad log p(y)] = 0. It is REINFORCE
    with -r as the reward (Williams 1992; the estimator "k1" in Schulman, Approximating KL Divergence, 2020). Differentiating r
    itself would be wrong: the mean of that gradient is zero. Unbiased only while y comes from the present weights at
    temperature 1, so at a round's first step; nothing corrects the later ones.
    """
    logp_N = token_logp(logits_NV, sampled_N)
    reward_N = (logp_N - teacher_logp_sampled_N).detach()
    return (reward_N + reward_N * (logp_N - logp_N.detach())).sum()


def token_logp(logits_NV: torch.Tensor, ids_N: torch.Tensor) -> torch.Tensor:
    """log p of one token each, float32 [N]."""
    logits_NV = logits_NV.float()
    return logits_NV.gather(-1, ids_N[:, None])[:, 0] - logits_NV.logsumexp(-1)


@dataclass(frozen=True)
class OnPolicyLoss:
    """A loss of phase 3.

    Attributes:
        function: (logits [N, V], *targets) -> summed loss.
        targets: the fields of the teacher's view (`objectives.scoring.Scored`) that it is given, in order.
        own_samples: it estimates with what the student itself would write: temperature and top_p must be 1.
    """

    function: Callable[..., torch.Tensor]
    targets: tuple[str, ...]
    own_samples: bool = False


_BUCKETS = ("ids_CS", "logp_CS", "log_tail_C")
ON_POLICY_LOSSES: dict[str, OnPolicyLoss] = {
    "reverse_kl": OnPolicyLoss(reverse_kl, _BUCKETS),
    "forward_kl": OnPolicyLoss(forward_kl, _BUCKETS),
    "reverse_kl_no_tail": OnPolicyLoss(reverse_kl_no_tail, _BUCKETS),
    "sampled_token": OnPolicyLoss(sampled_token, ("sampled_C", "sampled_logp_C"), own_samples=True),
}
"""`on_policy.loss`."""


@torch.no_grad()
def mass_on(logits_NV: torch.Tensor, ids_NS: torch.Tensor) -> torch.Tensor:
    """sum_S p, summed over tokens: how much of the model's mass the teacher's top-k cover."""
    logits_NV = logits_NV.float()
    return (logits_NV.gather(-1, ids_NS) - logits_NV.logsumexp(-1, keepdim=True)).exp().sum()


def chunked(
    loss: Callable[..., torch.Tensor],
    hidden_NH: torch.Tensor,
    lm_head: Callable[[torch.Tensor], torch.Tensor],
    *targets: torch.Tensor,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """`loss(lm_head(hidden), *targets)` summed over chunks of tokens; each chunk's logits are recomputed in backward.

    `loss` may return a vector (a loss and what is to be logged beside it); it is summed as it is.

    Value and gradient equal the dense form's up to the order of the sum.
    """

    def one(hidden: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        return loss(lm_head(hidden), *parts)

    total = hidden_NH.new_zeros((), dtype=torch.float32)
    for start in range(0, hidden_NH.shape[0], chunk):
        parts = [target[start : start + chunk] for target in targets]
        total = total + checkpoint(one, hidden_NH[start : start + chunk], *parts, use_reentrant=False)
    return total
