"""What merging and requantising leaves of a LoRA (docs/method.md 1.6)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from edge0_train.data.rows import Batch
from edge0_train.measure.bench import Bench, Stage, routing_of, running
from edge0_train.measure.merging import merged_weights
from edge0_train.objectives.passes import hidden_at_labels

SURVIVAL_BATCHES = 4
"""Of `ROWS` rows, for the logits: enough, and every batch runs three models."""
GROUPS = {
    "linear_attn": "linear attention", "self_attn": "attention", "attention": "attention",
    "shared_expert": "shared expert", "shared_experts": "shared expert", "mlp": "dense MLP",
}  # fmt: skip
"""By the first of these path elements; Ling's `attention` is of both kinds."""


def survival(bench: Bench, stage: Stage) -> dict[str, float]:
    """1 - |U - M| / |U - B| for the stage's LoRA: 1 if merging keeps all of it, 0 if the error is as large as the LoRA.

    U unmerged, M merged and requantised, B base; |.| is the root of summed squares, so a LoRA smaller than int4's rounding error
    gives a negative share. Weights: over a group's targets together; logits: over completion tokens, on the stage's own path.
    """
    error: dict[str, list[float]] = {group: [0.0, 0.0] for group in GROUPS.values()}
    with running(bench, dataclasses.replace(stage, merged=False)) as path, torch.no_grad():
        for module, layer, unmerged, again in merged_weights(path, bench.config.base.directory):
            group = next(name for part, name in GROUPS.items() if f".{part}." in module)
            error[group][0] += float((unmerged - again).square().sum())
            error[group][1] += float((unmerged - layer.base_layer.weight.float()).square().sum())
    share = {group: 1 - (lost / total) ** 0.5 for group, (lost, total) in error.items() if total}
    variants = [dataclasses.replace(stage, merged=False), dataclasses.replace(stage, merged=True)]
    variants.append(dataclasses.replace(stage, lora=None, merged=False))
    lost = total = 0.0
    for batch in bench.batches[:SURVIVAL_BATCHES]:
        unmerged, again, base = (_logits(bench, variant, batch) for variant in variants)
        lost += float((unmerged - again).square().sum())
        total += float((unmerged - base).square().sum())
    return share | {"logits": 1 - (lost / total) ** 0.5}


@torch.no_grad()
def _logits(bench: Bench, stage: Stage, batch: Batch) -> torch.Tensor:
    """[N, V] at the batch's labels: held whole, so for small vocabularies or few rows."""
    with running(bench, stage) as path:
        head: Callable[[torch.Tensor], torch.Tensor] = path.model.lm_head
        return head(hidden_at_labels(path, batch, routing_of(path, stage, batch))).float()
