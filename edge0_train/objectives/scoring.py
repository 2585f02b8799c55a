"""The teacher's view of every token that the student wrote, cached on disk batch by batch."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from safetensors.torch import load_file, save
from torch import nn

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import atomic_replace
from edge0_train.build import Student
from edge0_train.config import Config
from edge0_train.data.rows import IGNORE, Batch, TextRow, collate
from edge0_train.losses import CHUNK, token_logp, topk_with_tail
from edge0_train.objectives.passes import hidden_at_labels, labels_of
from edge0_train.run import my_share
from edge0_train.stopping import leave_together, polled
from edge0_train.student import StudentPath
from edge0_train.teacher import build_teacher


@dataclass(frozen=True)
class Scored:
    """The teacher's view of one row's completion of C tokens, in float32.

    Attributes:
        ids_CS, logp_CS, log_tail_C: its top-k with their log-probabilities, and the log of the mass outside.
        sampled_C, sampled_logp_C: the token that the student wrote, and the teacher's log-probability of it.
    """

    ids_CS: torch.Tensor
    logp_CS: torch.Tensor
    log_tail_C: torch.Tensor
    sampled_C: torch.Tensor
    sampled_logp_C: torch.Tensor


@dataclass
class Scorer:
    """The teacher when it is needed: kept, or (teacher.resident=false) loaded for a round while the student waits on the host."""

    config: Config
    student: Student
    kept: StudentPath | None = None

    def __post_init__(self) -> None:
        if self.config.teacher.resident:
            self.kept = build_teacher(self.config)

    def __call__(self, score: Callable[[StudentPath], None]) -> None:
        """Call `score` with the teacher on its device."""
        if self.kept:
            score(self.kept)
            return
        with in_host_memory(self.student.path.model):
            score(build_teacher(self.config))
            gc.collect()  # modules and hooks refer to each other: without it the teacher would stay beside the student


@contextmanager
def in_host_memory(model: nn.Module) -> Iterator[None]:
    """Inside the block, what the model has on a device lies in host memory; what is not there (base.residency) is left alone."""
    placed = [(t, t.device) for t in (*model.parameters(), *model.buffers()) if t.device.type != "cpu"]
    for tensor, _ in placed:
        tensor.data = tensor.data.cpu()
    try:
        yield
    finally:
        for tensor, device in placed:
            tensor.data = tensor.data.to(device)


def score(config: Config, directory: Path, scorer: Scorer, pad_id: int, rollout: list[TextRow]) -> list[Scored]:
    """The teacher's view of every row, cached in the round's directory as safetensors, each rank its share of the batches.

    Raises Edge0Error when a file of scores lacks a field, `Interrupted` after a signal and the batch at hand.
    """
    starts = range(0, len(rollout), config.sample.batch)
    files = {start: directory / f"scores-{start:08d}.safetensors" for start in starts}
    missing = [start for start, file in files.items() if not file.exists()]
    PartialState().wait_for_everyone()  # all ranks have seen the same files before any of them writes
    mine = my_share(missing)

    def write(teacher: StudentPath) -> None:
        for start in mine:
            if stopped():
                break
            batch = collate(rollout[start : start + config.sample.batch], pad_id, teacher.model.device)
            with atomic_replace(files[start]) as temporary:
                temporary.write_bytes(save(teacher_scores(teacher, batch, config.on_policy.top_k)))

    with polled() as stopped:
        if mine:
            scorer(write)
        kept = sum(file.exists() for file in files.values())
        leave_together(stopped(), f"the scores of {kept} of {len(files)} batches are kept")
    scores = []
    for file in files.values():
        stored = load_file(str(file))
        lacking = [f.name for f in dataclasses.fields(Scored) if f.name not in stored]
        if lacking:
            raise Edge0Error(f"{file}: lacks {', '.join(lacking)}; it is from an older version: delete it and resume")
        lengths = stored["lengths"].tolist()
        columns = [stored[f.name].split(lengths) for f in dataclasses.fields(Scored)]
        scores += [Scored(*row) for row in zip(*columns, strict=True)]
    return scores


@torch.no_grad()
def teacher_scores(teacher: StudentPath, batch: Batch, top_k: int) -> dict[str, torch.Tensor]:
    """The fields of `Scored` at every completion token of the batch, row after row; `lengths` [B] tells the rows apart.

    The teacher is native at its published K.
    """
    hidden_NH, sampled_N = hidden_at_labels(teacher, batch, teacher.native(teacher.tier.base_k)), labels_of(batch)
    parts = []
    for hidden, sampled in zip(hidden_NH.split(CHUNK), sampled_N.split(CHUNK), strict=True):
        logits = teacher.model.lm_head(hidden)
        parts.append((*topk_with_tail(logits, top_k), sampled, token_logp(logits, sampled)))
    columns = [torch.cat(column).cpu().contiguous() for column in zip(*parts, strict=True)]
    names = [f.name for f in dataclasses.fields(Scored)]
    return dict(zip(names, columns, strict=True)) | {"lengths": (batch.labels_BT != IGNORE).sum(1).cpu()}


def join(scores: Sequence[Scored], device: torch.device) -> Scored:
    """Scores of several rows, one after the other, as `labels != IGNORE` flattens them."""
    fields = [f.name for f in dataclasses.fields(Scored)]
    return Scored(*(torch.cat([getattr(s, name) for s in scores]).to(device) for name in fields))
