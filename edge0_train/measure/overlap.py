"""What neighbouring tokens share of a layer's experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edge0_train.data.rows import Batch
from edge0_train.measure.recall import found
from edge0_train.student import StudentPath
from edge0_train.student.router import multi_hot


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
            shared[layer] = shared.get(layer, 0.0) + float(found(now, before, experts).sum())
            used_E[layer] = used_E.get(layer, 0.0) + multi_hot(executed_BTK[batch.decoded_BT], experts).sum(0)
    frequency = [float((count_E / tokens).square().sum()) / k for count_E in used_E.values()]
    return {
        "overlap": sum(shared.values()) / (k * pairs * len(shared)),
        "chance": k / experts,
        "frequency": sum(frequency) / len(frequency),
    }
