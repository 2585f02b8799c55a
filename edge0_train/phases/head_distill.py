"""phase=head_distill and phase=head_refine: prerouter heads against the next layer's true router, one token ahead.

    python -m edge0_train phase=head_distill tier=35b

Phase 1 (docs/method.md 2.1) runs the base natively: heads learn from the features of a model that routes correctly. Refinement
goes on from there (phase=head_refine): the heads' own predictions route, as in decoding, and the target is the true
router on the hidden states that come of it. It closes the "feature drift" that the paper leaves open.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.provenance import DataSource
from edge0_train.adapters import input_path, write_output
from edge0_train.build import build_student, check_text, sketch_student
from edge0_train.config import Config
from edge0_train.data.rows import IGNORE, Batch, micro_batches, read_data, shuffled
from edge0_train.loop import Backward, Problem, train
from edge0_train.losses import HEAD_LOSSES, chunked, cross_entropy
from edge0_train.phases.student_sft import mean_loss
from edge0_train.plan import Rows, training_plan
from edge0_train.recall import BASELINES, RecallReport, best_baseline, measure_recall
from edge0_train.report import print_plan, table
from edge0_train.run import Run
from edge0_train.student import PrerouterHeads, RoutingPass, StudentPath

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
    refining = config.phase == "head_refine"
    if config.dry_run:
        sketch = sketch_student(config, lora=False, heads=True)
        assert sketch.heads
        print_plan(config, _plan(config, sketch, sketch.heads, Rows.planned(config)))
        return {}
    data, dropped = read_data(config.text.rows, config.text.max_length)
    student = build_student(config, prerouter=input_path(config, "prerouter") if refining else "")
    check_text(config, student, data)
    path, pad_id, device = student.path, student.chat.pad_id, student.path.model.device
    heads = path.heads
    if heads is None:
        torch.manual_seed(config.seed)
        heads = PrerouterHeads(tier).to(device)
        heads.warm_start(lambda layer: path.router(layer).weight)
    trainable = dict(heads.requires_grad_(True).named_parameters())
    print_plan(config, _plan(config, path, heads, Rows.of_data(data, dropped)))
    order = shuffled(len(data.train), optim.rows, config.seed)

    def window(step: int) -> list[HeadBatch]:
        batches = micro_batches(data.train, order(step), optim.micro_rows, pad_id, device, config.text.pack_length)
        return [HeadBatch(b, path.timeline(b.decoded_BT, b.start_BT)[0], len(tier.owners)) for b in batches]

    def loss(micro: HeadBatch, backward: Backward) -> dict[str, float]:
        where = micro.batch.decoded_BT, micro.batch.start_BT
        routing = path.predicted(*where) if refining else path.native(tier.k, *where)
        distill(path, heads, routing, micro, config.heads.loss, backward)
        return {}

    held_rows = data.held_out[:RECALL_ROWS]
    held_out = micro_batches(held_rows, np.arange(len(held_rows)), optim.micro_rows, pad_id, device)
    before = measure_recall(path, heads, held_out)
    result = train(run, optim, Problem(trainable, window, loss))
    after = measure_recall(path, heads, held_out)
    summary = _report(before, after, perplexities(path, heads, held_out))
    baseline, best = best_baseline(after)
    if after.recall <= best:
        raise Edge0Error(
            f"heads: held-out recall@{tier.k} {after.recall:.3f} does not beat the trivial baseline {baseline}"
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


def distill(
    path: StudentPath, heads: PrerouterHeads, routing: RoutingPass, micro: HeadBatch, loss: str, backward: Backward
) -> None:
    """The heads' summed loss on one pass over the base, without gradients through it; `backward` gets one head's at a time.

    A head's loss is taken as soon as the next layer's router has spoken, in the middle of the pass: heads share nothing, so only
    one owner's features and one head's graph are ever held (for all of the 35b's 33 owners at 8 x 4096 tokens the features
    alone would be 11 GB).

    Args:
        loss: name in `HEAD_LOSSES`.
    """
    tier, at_BT = path.tier, micro.predicted_BT

    def pair(owner: int, features_BTF: torch.Tensor, router_BTE: torch.Tensor) -> None:
        with torch.enable_grad():
            head_NE = heads(owner, features_BTF[at_BT])
            backward(HEAD_LOSSES[loss](tier.router, head_NE, router_BTE[at_BT], tier.k, path.expert_bias(owner + 1)))

    routing.pair = pair
    with torch.no_grad():
        path.hidden(micro.batch.input_ids_BT, routing, use_cache=False)


def _plan(config: Config, path: StudentPath, heads: PrerouterHeads, rows: Rows) -> dict[str, str]:
    """The phase's plan; `path` and `heads` may be on the meta device."""
    tier = config.tier
    facts = training_plan(config, path, dict(heads.named_parameters()), rows, through_base=False)
    shape = f"{tier.head_input} -> {tier.head_width} -> {tier.num_experts}"
    return facts | {
        "heads": f"{len(tier.owners)} (owners {tier.owners[0]}..{tier.owners[-1]}), {shape}, on"
        f" {'student' if config.phase == 'head_refine' else 'base'} features,"
        f" {config.heads.loss} loss"
    }


def perplexities(path: StudentPath, heads: PrerouterHeads, batches: Sequence[Batch]) -> dict[str, float]:
    """Held-out perplexity of completions: `committed`, routed by these heads as serving does, and `native` at the served K."""
    path.heads = heads
    committed = mean_loss(path, batches)
    native = 0.0
    for batch in batches:
        with torch.no_grad():
            output = path.hidden(batch.input_ids_BT, path.native(path.tier.k, start_BT=batch.start_BT), use_cache=False)
            at_BT = batch.labels_BT != IGNORE
            states_NH = output.last_hidden_state[at_BT]
            native += float(chunked(cross_entropy, states_NH, path.model.lm_head, batch.labels_BT[at_BT]))
    return {"committed": math.exp(committed), "native": math.exp(native / sum(batch.valid for batch in batches))}


def _report(before: RecallReport, after: RecallReport, perplexity: dict[str, float]) -> dict[str, Any]:
    """Print held-out recall per layer and group, baselines, cache misses and perplexity; return them for done.json."""
    measures = [name for name in after.by_layer[next(iter(after.by_layer))] if name not in BASELINES]
    rows = [
        [f"layer {owner + 1}", after.tokens, *(values[name] for name in (*measures, *BASELINES))]
        for owner, values in after.by_layer.items()
    ]
    rows += [["mean", after.tokens, *(after.mean(name) for name in (*measures, *BASELINES))]]
    rows += [
        [group, values["tokens"], *(values[name] for name in measures), *[None] * len(BASELINES)]
        for group, values in after.by_group.items()
    ]
    print(table(["held out", "tokens", *measures, *BASELINES], rows))
    for size, misses in after.lru_misses.items():
        print(
            f"LRU of {size} experts a layer: {misses['predicted']:.2f} misses a token, {misses['true']:.2f} by the true sets"
        )
    print(
        f"recall@{after.k} before {before.recall:.3f}, after {after.recall:.3f}; perplexity with heads committed"
        f" {perplexity['committed']:.4g}, native at K={after.k} {perplexity['native']:.4g}"
    )
    means = {"heads": after.recall, "before": before.recall, **after.baselines}
    return {
        "recall": {name: round(value, 4) for name, value in means.items()},
        "recall_by_layer": {f"{n}->{n + 1}": round(v[f"recall@{after.k}"], 4) for n, v in after.by_layer.items()},
        "recall_report": after.to_dict(),
        "perplexity": {name: round(value, 4) for name, value in perplexity.items()},
    }
