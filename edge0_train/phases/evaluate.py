"""phase=evaluate: every stage of a training on the same held-out prompts, in one table.

    python -m edge0_train phase=evaluate tier=nano

Stages are the adapters found below `root`: the teacher, the int4 base at its own and at the served K, the base with untrained
(warm-started) heads, then what each phase of `chain` has made of it. `edge0_train.measure` does the measuring.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edge0_runtime.contract.artifacts import KINDS, Adapter, Kind
from edge0_runtime.contract.binding import check_binding
from edge0_runtime.contract.errors import Edge0Error
from edge0_train.adapters import read_input
from edge0_train.config import STAGE_NAMES, Config
from edge0_train.data.rows import read_data
from edge0_train.measure.bench import Stage, load_heads, open_bench, warm_heads
from edge0_train.measure.quality import measure
from edge0_train.report import print_plan, table
from edge0_train.run import Run


def evaluate(config: Config, run: Run) -> dict[str, Any]:
    """Write `table.json` (in the summary) and print the table: loss and KL per completion token, exact match per task."""
    tier = config.tier
    if config.dry_run and not (Path(config.text.rows) / "card.json").is_file():
        print_plan(config, {"rows": f"no text yet: {config.sample.eval_prompts} held-out prompts at most"})
        return {}
    data, dropped = read_data(config.text.rows, config.text.max_length)
    rows = data.held_out[: config.sample.eval_prompts]
    adapters = _adapters(config)
    found = ", ".join(f"{kind} of {phase}" for phase, kind, _ in adapters) or "none yet"
    print_plan(config, {"rows": f"{len(rows)} held-out prompts (dropped: {dropped or 'none'})", "adapters": found})
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
    ]
    heads, lora = warm, None
    for phase, kind, adapter in adapters:
        check_binding(
            bench.student.base.fingerprint,
            adapter if kind == "prerouter" else None,
            adapter if kind == "lora" else None,
        )
        if kind == "prerouter":
            heads = load_heads(bench.student.path, adapter)
        else:
            lora = adapter.tensors
        stage = Stage(STAGE_NAMES[phase], heads=heads, lora=lora)
        stages = [*(s for s in stages if s.name != stage.name), stage]

    results = []
    for stage in stages:
        results.append({"stage": stage.name, **measure(bench, stage)})
        print(f"  {stage.name}: KL to teacher {results[-1]['kl']:.4g}", flush=True)
    columns = {"stage": "stage", "loss": "loss", "kl": "KL to teacher", "recall": f"recall@{tier.k}"}
    columns |= {"exact_match": "exact match"} | {
        task: task for task in sorted({row.task for row in rows if row.answer})
    }
    text = table(list(columns.values()), [[r.get(c) for c in columns] for r in results])
    print(text)
    return {"rows": len(rows), "table": results, "text": text}


def _adapters(config: Config) -> list[tuple[str, Kind, Adapter]]:
    """(phase, kind, file) of every adapter that the chain has written, in order; a phase's heads before its LoRA."""
    found: list[tuple[str, Kind, Adapter]] = []
    for phase in config.chain:
        for kind in KINDS:
            path = Path(config.root) / phase / config.tier.file_name(kind)
            adapter = read_input(config, kind, str(path)) if path.is_file() else None
            if adapter:
                found.append((phase, kind, adapter))
    return found
