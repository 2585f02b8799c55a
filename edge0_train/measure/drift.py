"""How far decoding moves what the heads see from what native routing would show them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edge0_train.data.rows import Batch
from edge0_train.measure.recall import head_recall
from edge0_train.student import StudentPath


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
