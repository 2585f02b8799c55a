"""phase=evaluate: every stage of a training on the same held-out prompts, in one table.

    python -m edge0_train phase=evaluate tier=nano

Stages are the adapters found below `root`: the teacher, the int4 base at its own and at the served K, the base with untrained
(warm-started) heads, then what each phase of `chain` has made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edge0_runtime.contract.artifacts import KINDS, Adapter, Kind, check_binding
from edge0_runtime.contract.errors import Edge0Error
from edge0_train.adapters import read_input
from edge0_train.build import build_student, build_teacher
from edge0_train.config import Config
from edge0_train.data.rows import IGNORE, Batch, TextRow, collate, read_data
from edge0_train.data.tasks import is_correct
from edge0_train.report import print_plan, table
from edge0_train.run import Run
from edge0_train.student import (
    PrerouterHeads,
    RoutingPass,
    Sampling,
    StudentPath,
    generate,
    load_lora,
    lora_disabled,
)

STAGE_NAMES = {
    "head_distill": "heads only",
    "head_refine": "+ refinement",
    "student_sft": "+ SFT",
    "on_policy": "+ on-policy",
}


@dataclass(frozen=True)
class Stage:
    """One row of the table: how to route, and what to prepare before it runs."""

    name: str
    path: StudentPath
    native_k: int | None
    heads: PrerouterHeads | None = None
    lora: dict[str, Any] | None = None


def evaluate(config: Config, run: Run) -> dict[str, Any]:
    """Write `table.json` (in the summary) and print the table: loss and KL per completion token, exact match per task."""
    tier = config.tier
    data, dropped = read_data(config.text.rows, config.text.max_length)
    rows = data.held_out[: config.sample.eval_prompts]
    print_plan(config, {"rows": f"{len(rows)} held-out prompts (dropped: {dropped or 'none'})"})
    if config.dry_run:
        return {}
    adapters = _adapters(config)
    if not any(kind == "prerouter" for _, kind, _ in adapters):
        raise Edge0Error(f"root: no phase has written heads below {config.root}; run phase=head_distill first")
    student = build_student(config, new_lora=True)
    teacher, path = build_teacher(config), student.path
    warm = PrerouterHeads(tier).to(path.model.device)
    warm.warm_start(lambda layer: path.router(layer).weight)
    stages = [
        Stage(f"teacher, K={tier.base_k}", teacher, tier.base_k),
        Stage(f"int4, K={tier.base_k}", path, tier.base_k),
        Stage(f"int4, K={tier.k}", path, tier.k),
        Stage("untrained heads", path, None, warm),
    ]
    heads, lora = warm, None
    for phase, kind, adapter in adapters:
        check_binding(
            student.base.fingerprint, adapter if kind == "prerouter" else None, adapter if kind == "lora" else None
        )
        if kind == "prerouter":
            heads = PrerouterHeads(tier).to(path.model.device)
            heads.load(adapter.tensors)
        else:
            lora = adapter.tensors
        stage = Stage(STAGE_NAMES[phase], path, None, heads, lora)
        stages = [*(s for s in stages if s.name != stage.name), stage]

    batches = [collate(rows[i : i + 64], student.chat.pad_id, path.model.device) for i in range(0, len(rows), 64)]
    reference = [_hidden(teacher, batch, teacher.native(tier.base_k)) for batch in batches]
    results = []
    for stage in stages:
        stage.path.heads = stage.heads
        if stage.lora is not None:
            load_lora(path.model, tier, stage.lora)
        with nullcontext() if stage.lora is not None or stage.path is teacher else lora_disabled(path.model):
            scores = _token_scores(stage, batches, reference, teacher.model.lm_head)
            matches = _exact_match(config, stage, student.chat, rows)
        results.append({"stage": stage.name, **scores, **matches})
        print(f"  {results[-1]}", flush=True)
    tasks = sorted({row.task for row in rows if row.answer})
    columns = ["stage", "loss", "kl", "exact_match", *tasks]
    text = table(
        ["stage", "loss", "KL to teacher", "exact match", *tasks], [[r.get(c) for c in columns] for r in results]
    )
    print(text)
    return {"rows": len(rows), "table": results}


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


@torch.no_grad()
def _hidden(path: StudentPath, batch: Batch, routing: RoutingPass) -> torch.Tensor:
    """Final hidden states [N, H] at the completions' labels."""
    output = path.hidden(batch.input_ids_BT, routing, use_cache=False)
    return output.last_hidden_state[batch.labels_BT != IGNORE]


@torch.no_grad()
def _token_scores(
    stage: Stage, batches: Sequence[Batch], reference: Sequence[torch.Tensor], teacher_head: Callable[..., torch.Tensor]
) -> dict[str, float]:
    """Mean cross-entropy, and mean KL(teacher || stage) over the whole vocabulary, per completion token."""
    loss = divergence = 0.0
    count = 0
    for batch, teacher_NH in zip(batches, reference, strict=True):
        native = stage.native_k
        routing = stage.path.native(native) if native else stage.path.predicted(batch.decoded_BT)
        hidden_NH = _hidden(stage.path, batch, routing)
        target_N = batch.labels_BT[batch.labels_BT != IGNORE]
        for own, other, target in zip(hidden_NH.split(1024), teacher_NH.split(1024), target_N.split(1024), strict=True):
            logp = stage.path.model.lm_head(own).float().log_softmax(-1)
            teacher_logp = teacher_head(other).float().log_softmax(-1)
            loss -= float(logp.gather(-1, target[:, None]).sum())
            divergence += float((teacher_logp.exp() * (teacher_logp - logp)).sum())
        count += batch.valid
    return {"loss": loss / count, "kl": divergence / count}


def _exact_match(config: Config, stage: Stage, chat: Any, rows: Sequence[TextRow]) -> dict[str, float]:
    """Share of greedy completions with the right answer, over all rows that have one and per task."""
    checked = [row for row in rows if row.answer]
    right: dict[str, list[bool]] = {}
    for start in range(0, len(checked), config.sample.batch):
        part = checked[start : start + config.sample.batch]
        completions = generate(
            stage.path,
            [row.prompt_ids for row in part],
            Sampling(config.sample.max_new_tokens),
            end_ids=chat.end_ids,
            pad_id=chat.pad_id,
            native_k=stage.native_k,
        )
        for row, done in zip(part, completions, strict=True):
            right.setdefault(row.task, []).append(is_correct(row.answer, chat.text(done.ids)))
    if not checked:
        return {}
    everything = [value for values in right.values() for value in values]
    per_task = {task: sum(values) / len(values) for task, values in sorted(right.items())}
    return {"exact_match": sum(everything) / len(everything), **per_task}
