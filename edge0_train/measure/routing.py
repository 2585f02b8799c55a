"""How well heads predict on held-out rows, how far decoding moves their features, and what neighbouring tokens share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edge0_train.data.rows import Batch
from edge0_train.student import StudentPath
from edge0_train.student.routing import multi_hot, select


@torch.no_grad()
def head_recall(path: StudentPath, batches: Sequence[Batch], own: bool) -> dict[str, float]:
    """Recall@K of the path's heads at predicted inputs, {"mean" and every owner: share of the true set}.

    The true set is the next layer's own gate at the served K, on the hidden states of the same pass: under native routing, or
    (own) under the heads' own predictions, as in decoding.
    """
    hits, targets, heads = dict.fromkeys(path.tier.owners, 0.0), 0, path.heads
    assert heads is not None
    at_BT: torch.Tensor

    def pair(owner: int, features_BTF: torch.Tensor, router_BTE: torch.Tensor) -> None:
        guess_NK = select(path.tier.router, heads(owner, features_BTF[at_BT]), path.tier.k)
        true_NK = select(path.tier.router, router_BTE[at_BT], path.tier.k, path.expert_bias(owner + 1))
        hits[owner] += _shared(guess_NK, true_NK, path.tier.num_experts)

    for batch in batches:
        where = batch.decoded_BT, batch.start_BT
        at_BT = path.timeline(*where)[0]
        targets += int(at_BT.sum())
        routing = path.predicted(*where) if own else path.native(path.tier.k, *where)
        routing.pair = pair
        path.hidden(batch.input_ids_BT, routing, use_cache=False)
    recall = {owner: hit / (path.tier.k * targets) for owner, hit in hits.items()}
    return {"mean": sum(recall.values()) / len(recall), **{str(owner): value for owner, value in recall.items()}}


@torch.no_grad()
def feature_drift(path: StudentPath, batches: Sequence[Batch]) -> dict[str, float]:
    """How far decoding takes a head's hidden features away from those of native routing, on the same text.

    h is layer N's MoE input at the inputs before predicted ones, for the owner layers N that predictions can reach (above the
    first consumer). cosine: mean over tokens and owners. relative_l2: |h_own - h_native| / |h_native|, root of summed squares
    per owner, mean over owners. recall_native and recall_own: of the heads, on either side.
    """
    tier = path.tier
    owners = [owner for owner in tier.owners if owner > tier.consumers[0]]
    cosine, moved, size = (dict.fromkeys(owners, 0.0) for _ in range(3))
    count = 0
    for batch in batches:
        where = batch.decoded_BT, batch.start_BT
        features = []
        for routing in (path.native(tier.k, *where, capture=True), path.predicted(*where, capture=True)):
            path.hidden(batch.input_ids_BT, routing, use_cache=False)
            features.append(routing.features)
        at_BT = path.timeline(*where)[0]
        count += int(at_BT.sum())
        for owner in owners:
            native_NH, own_NH = (side[owner][at_BT][:, : tier.hidden_size] for side in features)
            cosine[owner] += float(torch.cosine_similarity(native_NH, own_NH, dim=-1).sum())
            moved[owner] += float((own_NH - native_NH).square().sum())
            size[owner] += float(native_NH.square().sum())
    return {
        "cosine": sum(cosine.values()) / (count * len(owners)),
        "relative_l2": sum((moved[o] / size[o]) ** 0.5 for o in owners) / len(owners),
        "recall_native": head_recall(path, batches, own=False)["mean"],
        "recall_own": head_recall(path, batches, own=True)["mean"],
    }


@torch.no_grad()
def adjacent_overlap(path: StudentPath, batches: Sequence[Batch], k: int) -> dict[str, float]:
    """Share of a layer's k experts that also ran for the token before, over decoded inputs and all MoE layers.

    chance: k / E, for even and independent use. frequency: sum_e f_e^2 / k with f_e the share of tokens that use expert e in
    that layer, for independent draws with the experts' real popularity.
    """
    experts, pairs = path.tier.num_experts, 0
    shared: dict[int, float] = {}
    used_E: dict[int, torch.Tensor] = {}
    tokens = 0
    for batch in batches:
        routing = path.native(k)
        path.hidden(batch.input_ids_BT, routing, use_cache=False)
        both_BT = batch.decoded_BT[:, 1:] & batch.decoded_BT[:, :-1]
        pairs, tokens = pairs + int(both_BT.sum()), tokens + int(batch.decoded_BT.sum())
        for layer, executed_BTK in routing.executed.items():
            now, before = executed_BTK[:, 1:][both_BT], executed_BTK[:, :-1][both_BT]
            shared[layer] = shared.get(layer, 0.0) + _shared(now, before, experts)
            used_E[layer] = used_E.get(layer, 0.0) + multi_hot(executed_BTK[batch.decoded_BT], experts).sum(0)
    frequency = [float((count_E / tokens).square().sum()) / k for count_E in used_E.values()]
    return {
        "overlap": sum(shared.values()) / (k * pairs * len(shared)),
        "chance": k / experts,
        "frequency": sum(frequency) / len(frequency),
    }


def _shared(a_NK: torch.Tensor, b_NK: torch.Tensor, experts: int) -> float:
    """Experts that are in both sets, summed over tokens."""
    return float((multi_hot(a_NK, experts) * multi_hot(b_NK, experts)).sum())
