"""phase=evaluate: every stage of a training on the same held-out prompts, in one table.

    python -m edge0_train phase=evaluate tier=nano
    python -m edge0_train phase=evaluate tier=nano root=runs/mine sample.eval_prompts=64

Stages are the adapters found below `root`: the teacher, the int4 base at its own and at the served K, the base with untrained
(warm-started) heads, then what each phase of `chain` has made of it. `edge0_train.measure` does the measuring.

Settings: root, text.rows, sample.eval_prompts (at most), sample.batch, sample.max_new_tokens. Answers are greedy.
Expected on nano, seed 0 (251 rows, 40 s of one core), KL to the teacher / exact match: int4 at K=4 .0076 / .956, untrained heads
.470 / .124, heads only .056 / .713, + refinement .042 / .757, + SFT .0040 / .992, + on-policy .0037 / .988.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.build import warm_heads
from edge0_train.config import Config
from edge0_train.data.counts import Rows
from edge0_train.data.rows import TextRow, text_of
from edge0_train.measure.bench import Stage, open_bench
from edge0_train.measure.quality import measure
from edge0_train.measure.stages import chain_adapters, chain_stages
from edge0_train.plan import memory_plan
from edge0_train.report import print_plan, table
from edge0_train.run import Run
from edge0_train.teacher import check_teacher


def evaluate(config: Config, run: Run) -> dict[str, Any]:
    """Write `table.json` (in the summary) and print the table: loss and KL per completion token, exact match per task."""
    tier, teacher = config.tier, check_teacher(config)
    if config.dry_run and not (Path(config.text.rows) / "card.json").is_file():
        told = {"teacher": teacher, "rows": f"no text yet: {config.sample.eval_prompts} held-out prompts at most"}
        print_plan(config, told | memory_plan(config, Rows.unwritten(config)))
        return {}
    data, dropped = text_of(config)
    rows = data.held_out[: config.sample.eval_prompts]
    adapters = chain_adapters(config)
    found = ", ".join(f"{kind} of {phase}" for phase, kind, _ in adapters) or "none yet"
    told = {
        "teacher": teacher,
        "rows": f"{len(rows)} held-out prompts (dropped: {dropped or 'none'})",
        "adapters": found,
    }
    print_plan(config, told | memory_plan(config, Rows.of(rows, len(rows), dropped)))
    if config.dry_run:
        return {}
    if not any(kind == "prerouter" for _, kind, _ in adapters):
        raise Edge0Error(f"root: no phase has written heads below {config.root}; run phase=head_distill first")
    bench = open_bench(config, rows)
    warm = warm_heads(bench.student.path)
    stages = [
        Stage(f"teacher, K={tier.base_k}", tier.base_k, teacher=True),
        # One row if the tier keeps its base's K.
        *(Stage(f"int4, K={k}", k) for k in dict.fromkeys((tier.base_k, tier.k))),
        Stage("untrained heads", heads=warm),
        *chain_stages(bench, adapters, warm),
    ]
    results = []
    for stage in stages:
        results.append({"stage": stage.name, **measure(bench, stage)})
        print(f"  {stage.name}: KL to teacher {results[-1]['kl']:.4g}", flush=True)
    text = _table(tier.k, rows, results)
    print(text)
    return {"rows": len(rows), "table": results, "text": text}


def _table(k: int, rows: list[TextRow], results: list[dict[str, Any]]) -> str:
    """The results for people; a column for every task that has answers."""
    columns = {"stage": "stage", "loss": "loss", "kl": "KL to teacher", "recall": f"recall@{k}"}
    columns |= {"exact_match": "exact match"} | {
        task: task for task in sorted({row.task for row in rows if row.answer})
    }
    return table(list(columns.values()), [[r.get(c) for c in columns] for r in results])
