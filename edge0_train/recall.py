"""How well heads predict the next token's routing, beside the five trivial baselines that they must beat (method.md 3).

recall@K: share of the true router's K experts that are among the K predicted. Baselines, all with the same budget of K:
uniform (K / E), the layer's most frequent experts, the previous token's set, a vote over the last four tokens' sets
(the newest wins ties), and the next layer's gate applied to h(N, t).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from edge0_train.data.rows import Batch
from edge0_train.student.heads import PrerouterHeads
from edge0_train.student.path import StudentPath
from edge0_train.student.routing import multi_hot

BASELINES = ("uniform", "frequency", "previous", "last_four", "next_gate")


@torch.no_grad()
def measure_recall(path: StudentPath, heads: PrerouterHeads, batches: Sequence[Batch]) -> dict[str, dict[int, float]]:
    """{"heads" and every baseline: {owner: recall@K}} on the predicted inputs of `batches`, under native routing.

    The true set of a target is its layer's own gate at the served K.
    """
    tier, k = path.tier, path.tier.k
    frequency = _expert_counts(path, batches)
    hits: dict[str, dict[int, float]] = {name: defaultdict(float) for name in ("heads", *BASELINES)}
    targets = 0
    for batch in batches:
        routing = path.native(k, batch.decoded_BT, batch.start_BT, capture=True)
        path.hidden(batch.input_ids_BT, routing, use_cache=False)
        at_BT = path.timeline(batch.decoded_BT, batch.start_BT)[0]
        targets += int(at_BT.sum())
        for owner in tier.owners:
            true_BTE = multi_hot(routing.executed[owner + 1], tier.num_experts)
            weight_EH = path.router(owner + 1).weight.float()
            scores = {
                "heads": heads(owner, routing.features[owner]),
                "frequency": frequency[owner + 1].expand_as(true_BTE),
                "previous": true_BTE,
                "last_four": _recent_votes(true_BTE),
                "next_gate": routing.features[owner][..., : weight_EH.shape[1]] @ weight_EH.T,
            }
            wanted_NE = true_BTE[:, 1:][at_BT[:, 1:]]
            for name, score_BTE in scores.items():
                guess_NK = score_BTE[:, :-1][at_BT[:, 1:]].topk(k, -1).indices
                hits[name][owner] += float(wanted_NE.gather(-1, guess_NK).sum())
    result = {name: {o: hits[name][o] / (k * targets) for o in tier.owners} for name in hits}
    result["uniform"] = dict.fromkeys(tier.owners, k / tier.num_experts)
    return result


def mean(recall: dict[int, float]) -> float:
    """Mean over layers."""
    return sum(recall.values()) / len(recall)


def best_baseline(recall: dict[str, dict[int, float]]) -> tuple[str, float]:
    """Name and mean recall of the strongest baseline."""
    return max(((name, mean(recall[name])) for name in BASELINES), key=lambda pair: pair[1])


def _recent_votes(true_BTE: torch.Tensor) -> torch.Tensor:
    """Votes of the sets at t, t-1, t-2, t-3, the newer ones slightly heavier so that they win ties."""
    votes_BTE = torch.zeros_like(true_BTE)
    for age in range(min(4, true_BTE.shape[1])):
        votes_BTE[:, age:] += (1 - 0.01 * age) * true_BTE[:, : true_BTE.shape[1] - age]
    return votes_BTE


def _expert_counts(path: StudentPath, batches: Sequence[Batch]) -> dict[int, torch.Tensor]:
    """{layer: how often each expert ran [E]} at the completions' inputs."""
    counts: dict[int, torch.Tensor] = {}
    add: Callable[[int, torch.Tensor], None] = lambda layer, n: counts.__setitem__(layer, counts.get(layer, 0) + n)  # noqa: E731
    for batch in batches:
        routing = path.native(path.tier.k, start_BT=batch.start_BT)
        path.hidden(batch.input_ids_BT, routing, use_cache=False)
        for layer, executed in routing.executed.items():
            add(layer, multi_hot(executed[batch.decoded_BT], path.tier.num_experts).sum(0))
    return counts
