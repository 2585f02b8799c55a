"""What is compared: a `Bench` holds models and held-out rows, a `Stage` is one row of a table, `running` puts it in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from edge0_train.build import Student, build_student
from edge0_train.config import Config
from edge0_train.data.rows import Batch, TextRow, collate
from edge0_train.measure.merging import merged
from edge0_train.objectives.passes import hidden_at_labels
from edge0_train.student import PrerouterHeads, RoutingPass, StudentPath, load_lora, lora_disabled
from edge0_train.teacher import build_teacher

ROWS = 64
"""Rows of a forward pass."""


@dataclass(frozen=True)
class Stage:
    """One row of a table: which model, and how it routes.

    Attributes:
        native_k: own gates with that K throughout; None: the tier's timeline with `heads`.
        teacher: run the teacher instead of the int4 base.
        heads, lora: the adapters; None: no heads, the LoRA switched off.
        k: served K of the timeline, if it is not the tier's.
        merged: the LoRA added to the base's weights and quantised again, instead of running beside them.
    """

    name: str
    native_k: int | None = None
    teacher: bool = False
    heads: PrerouterHeads | None = None
    lora: Mapping[str, Any] | None = None
    k: int | None = None
    merged: bool = False


@dataclass(frozen=True)
class Bench:
    """Models and held-out rows on which stages are compared.

    Attributes:
        student: the int4 base with LoRA layers in it; its path's heads and LoRA are those of the stage that ran last.
        rows, batches: the held-out rows, and the same in batches of `ROWS`.
        reference: the teacher's final hidden states [N, H] at the labels of each batch.
    """

    config: Config
    student: Student
    teacher: StudentPath
    rows: tuple[TextRow, ...]
    batches: tuple[Batch, ...]
    reference: tuple[torch.Tensor, ...]


def open_bench(config: Config, rows: Sequence[TextRow]) -> Bench:
    """Load base and teacher, and let the teacher read the rows once."""
    student, teacher = build_student(config, new_lora=True), build_teacher(config)
    device = student.path.model.device
    parts = [rows[i : i + ROWS] for i in range(0, len(rows), ROWS)]
    batches = tuple(collate(part, student.chat.pad_id, device) for part in parts)
    with torch.no_grad():
        reference = tuple(hidden_at_labels(teacher, batch, teacher.native(teacher.tier.base_k)) for batch in batches)
    return Bench(config, student, teacher, tuple(rows), batches, reference)


@contextmanager
def running(bench: Bench, stage: Stage) -> Iterator[StudentPath]:
    """The stage's model inside the block: its heads, K and LoRA in place; afterwards K and the base's weights are back."""
    if stage.teacher:
        yield bench.teacher
        return
    path, tier = bench.student.path, bench.config.tier
    path.heads = stage.heads
    path.tier = dataclasses.replace(tier, k=stage.k or tier.k)
    if stage.lora is not None:
        load_lora(path.model, tier, stage.lora)
    with ExitStack() as stack:
        if stage.merged:
            stack.enter_context(merged(path, bench.config.base.directory))
        stack.enter_context(lora_disabled(path.model) if stage.lora is None or stage.merged else nullcontext())
        try:
            yield path
        finally:
            path.tier = tier


def routing_of(path: StudentPath, stage: Stage, batch: Batch) -> RoutingPass:
    """A new pass as the stage routes."""
    return path.native(stage.native_k) if stage.native_k else path.predicted(batch.decoded_BT)
