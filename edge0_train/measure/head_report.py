"""What training heads has brought: recall before and after, perplexity with them committed; printed, and for done.json."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.build import Student
from edge0_train.config import Config
from edge0_train.data.rows import Batch, TextData
from edge0_train.loop import Objective, train
from edge0_train.measure.recall import BASELINES, RecallReport, best_baseline, measure_recall
from edge0_train.objectives.passes import held_out_batches, mean_loss, native_pass
from edge0_train.report import table
from edge0_train.run import Run
from edge0_train.student import PrerouterHeads, StudentPath


def train_heads(
    run: Run, student: Student, heads: PrerouterHeads, objective: Objective, data: TextData
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train `heads` by `objective`, measured before and after: (the loop's summary, `report_heads`).

    Raises Edge0Error unless they end better than every trivial baseline.
    """
    held_out = held_out_batches(run.config, student, data.held_out)
    before = measure_recall(student.path, heads, held_out)
    result = train(run, run.config.optim, objective)
    after = measure_recall(student.path, heads, held_out)
    summary = report_heads(before, after, perplexities(student.path, heads, held_out))
    check_beats_baselines(run.config, after, len(data.train))
    return result, summary


def perplexities(path: StudentPath, heads: PrerouterHeads, batches: Sequence[Batch]) -> dict[str, float]:
    """Held-out perplexity of completions: `committed`, routed by these heads as serving does, and `native` at the served K."""
    path.heads = heads
    return {
        "committed": math.exp(mean_loss(path, batches)),
        "native": math.exp(mean_loss(path, batches, native_pass)),
    }


def check_beats_baselines(config: Config, report: RecallReport, rows: int) -> None:
    """Raise Edge0Error unless the heads beat every trivial baseline; `rows` is what they were trained on."""
    baseline, best = best_baseline(report)
    if report.recall <= best:
        raise Edge0Error(
            f"heads: held-out recall@{report.k} {report.recall:.3f} does not beat the trivial baseline {baseline}"
            f" ({best:.3f}); train longer (optim.steps={config.optim.steps}) or on more rows ({rows})"
        )


def report_heads(before: RecallReport, after: RecallReport, perplexity: dict[str, float]) -> dict[str, Any]:
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
