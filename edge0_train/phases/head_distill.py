"""phase=head_distill: prerouter heads against the next layer's true router, one token ahead (method.md 2.1).

python -m edge0_train phase=head_distill tier=35b
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.provenance import DataSource
from edge0_train.build import build_student, write_output
from edge0_train.config import Config
from edge0_train.data.rows import Batch, collate, micro_batches, read_data, shuffled
from edge0_train.loop import Problem, train
from edge0_train.losses import HEAD_LOSSES
from edge0_train.recall import BASELINES, best_baseline, mean, measure_recall
from edge0_train.report import print_plan
from edge0_train.run import Run
from edge0_train.student import PrerouterHeads

RECALL_ROWS = 64
"""Held-out rows for recall: a few thousand predicted positions per head."""


@dataclass(frozen=True)
class HeadBatch:
    """A batch whose loss runs over (predicted input, head) pairs."""

    batch: Batch
    predicted_BT: torch.Tensor
    heads: int

    @property
    def valid(self) -> int:
        return int(self.predicted_BT.sum()) * self.heads

    @property
    def tokens(self) -> int:
        return self.batch.tokens


def head_distill(config: Config, run: Run) -> dict[str, Any]:
    """Train all heads in one pass over the base, which runs natively at the served K, without gradients."""
    tier, optim = config.tier, config.optim
    data, dropped = read_data(config.text.rows, config.text.max_length)
    student = build_student(config)
    path, pad_id, device = student.path, student.chat.pad_id, student.path.model.device
    torch.manual_seed(config.seed)
    heads = PrerouterHeads(tier).to(device)
    heads.warm_start(lambda layer: path.router(layer).weight)
    trainable = dict(heads.named_parameters())
    print_plan(
        config,
        {
            "rows": f"{len(data.train)} train, {len(data.held_out)} held out (dropped: {dropped or 'none'})",
            "heads": f"owners {tier.owners[0]}..{tier.owners[-1]}, {tier.head_input} -> {tier.head_width} -> {tier.num_experts}",
            "trainable": f"{sum(p.numel() for p in trainable.values()):,} parameters",
            "step": f"{optim.rows} rows in micro-batches of {optim.micro_rows}, {optim.steps} steps, {config.heads.loss} loss",
        },
    )
    if config.dry_run:
        return {}
    order = shuffled(len(data.train), optim.rows, config.seed)
    loss_of = HEAD_LOSSES[config.heads.loss]

    def window(step: int) -> list[HeadBatch]:
        batches = micro_batches(data.train, order(step), optim.micro_rows, pad_id, device)
        return [HeadBatch(b, path.timeline(b.decoded_BT)[0], len(tier.owners)) for b in batches]

    def loss(micro: HeadBatch) -> tuple[torch.Tensor, dict[str, float]]:
        with torch.no_grad():
            routing = path.native(tier.k, micro.batch.decoded_BT, capture=True)
            path.hidden(micro.batch.input_ids_BT, routing, use_cache=False)
        at_BT = micro.predicted_BT[:, 1:]
        total = torch.zeros((), device=device)
        for owner in tier.owners:
            head_NE = heads(owner, routing.features[owner][:, :-1][at_BT])
            total = total + loss_of(tier.router, head_NE, routing.router_logits[owner + 1][:, 1:][at_BT], tier.k)
        return total, {}

    held_out = [collate(data.held_out[:RECALL_ROWS], pad_id, device)]
    before = measure_recall(path, heads, held_out)
    result = train(run, optim, Problem(trainable, window, loss))
    after = measure_recall(path, heads, held_out)
    summary = _report(before, after, tier.k)
    baseline, best = best_baseline(after)
    if mean(after["heads"]) <= best:
        raise Edge0Error(
            f"heads: held-out recall@{tier.k} {mean(after['heads']):.3f} does not beat the trivial baseline {baseline}"
            f" ({best:.3f}); train longer (optim.steps={optim.steps}) or on more rows ({len(data.train)})"
        )
    write_output(
        config,
        "prerouter",
        heads.tensors(),
        student.base,
        {**result, "held_out_recall": summary["recall"]["heads"]},
        DataSource(data.card["fingerprint"], len(data.train)),
        {},
    )
    return {**result, **summary, "dropped": dropped}


def _report(before: dict[str, dict[int, float]], after: dict[str, dict[int, float]], k: int) -> dict[str, Any]:
    """Print and return held-out recall: heads after and before training, baselines, per layer."""
    means = {"heads": mean(after["heads"]), "warm start": mean(before["heads"])}
    means |= {name: mean(after[name]) for name in BASELINES}
    print(f"held-out recall@{k}: " + ", ".join(f"{name} {value:.3f}" for name, value in means.items()))
    per_layer = {f"{owner}->{owner + 1}": round(value, 4) for owner, value in after["heads"].items()}
    print(f"heads by layer: {per_layer}")
    return {"recall": {name: round(value, 4) for name, value in means.items()}, "recall_by_layer": per_layer}
