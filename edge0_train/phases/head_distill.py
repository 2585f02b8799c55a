"""phase=head_distill and phase=head_refine: prerouter heads against the next layer's true router, one token ahead.

    python -m edge0_train phase=head_distill tier=35b

Phase 1 (method.md 2.1) runs the base natively: heads learn from the features of a model that routes correctly. Refinement goes
on from there with `heads.features=student`: the heads' own predictions route, as in decoding, and the target is the true router
on the hidden states that come of it. It closes the "feature drift" that the paper leaves open, and needs no other artifact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.provenance import DataSource
from edge0_train.adapters import input_path, write_output
from edge0_train.build import build_student
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
    """Train all heads in one pass over the base, without gradients through it; writes the prerouter file."""
    tier, optim = config.tier, config.optim
    refining = config.heads.features == "student"
    data, dropped = read_data(config.text.rows, config.text.max_length)
    student = build_student(config, prerouter=input_path(config, "prerouter") if refining else "")
    path, pad_id, device = student.path, student.chat.pad_id, student.path.model.device
    heads = path.heads
    if heads is None:
        torch.manual_seed(config.seed)
        heads = PrerouterHeads(tier).to(device)
        heads.warm_start(lambda layer: path.router(layer).weight)
    trainable = dict(heads.requires_grad_(True).named_parameters())
    shape = f"{tier.head_input} -> {tier.head_width} -> {tier.num_experts}"
    print_plan(
        config,
        {
            "rows": f"{len(data.train)} train, {len(data.held_out)} held out (dropped: {dropped or 'none'})",
            "heads": f"owners {tier.owners[0]}..{tier.owners[-1]}, {shape}, on {config.heads.features} features",
            "trainable": f"{sum(p.numel() for p in trainable.values()):,} parameters",
            "step": f"{optim.rows} rows in micro-batches of {optim.micro_rows}; {optim.steps} steps; {config.heads.loss} loss",
        },
    )
    if config.dry_run:
        return {}
    order = shuffled(len(data.train), optim.rows, config.seed)
    loss_of = HEAD_LOSSES[config.heads.loss]

    def window(step: int) -> list[HeadBatch]:
        batches = micro_batches(data.train, order(step), optim.micro_rows, pad_id, device, config.text.pack_length)
        return [HeadBatch(b, path.timeline(b.decoded_BT, b.start_BT)[0], len(tier.owners)) for b in batches]

    def loss(micro: HeadBatch) -> tuple[torch.Tensor, dict[str, float]]:
        where = micro.batch.decoded_BT, micro.batch.start_BT
        routing = path.predicted(*where, capture=True) if refining else path.native(tier.k, *where, capture=True)
        with torch.no_grad():
            path.hidden(micro.batch.input_ids_BT, routing, use_cache=False)
        at_BT = micro.predicted_BT[:, 1:]
        total = torch.zeros((), device=device)
        for owner in tier.owners:
            head_NE = heads(owner, routing.features[owner][:, :-1][at_BT])
            target_NE = routing.router_logits[owner + 1][:, 1:][at_BT]
            bias_E = getattr(path.router(owner + 1), "e_score_correction_bias", None)
            total = total + loss_of(tier.router, head_NE, target_NE, tier.k, bias_E)
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
        {"prerouter": student.prerouter},
    )
    return {**result, **summary, "dropped": dropped}


def _report(before: dict[str, dict[int, float]], after: dict[str, dict[int, float]], k: int) -> dict[str, Any]:
    """Print and return held-out recall: heads after and before training, baselines, per layer."""
    means = {"heads": mean(after["heads"]), "before": mean(before["heads"])}
    means |= {name: mean(after[name]) for name in BASELINES}
    print(f"held-out recall@{k}: " + ", ".join(f"{name} {value:.3f}" for name, value in means.items()))
    per_layer = {f"{owner}->{owner + 1}": round(value, 4) for owner, value in after["heads"].items()}
    print(f"heads by layer: {per_layer}")
    return {"recall": {name: round(value, 4) for name, value in means.items()}, "recall_by_layer": per_layer}
