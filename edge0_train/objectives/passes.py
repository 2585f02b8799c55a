"""What objectives and measurements do with batches of text rows: cut windows, choose a routing, look at the labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from edge0_train.build import Student
from edge0_train.config import Config
from edge0_train.data.rows import IGNORE, Batch, TextRow, micro_batches, shuffled
from edge0_train.losses import chunked, cross_entropy
from edge0_train.student import RoutingPass, StudentPath

HELD_OUT_ROWS = 64
"""Held-out rows that a training looks at: a few thousand predicted positions a head."""

MakePass = Callable[[StudentPath, Batch], RoutingPass]
"""How a batch runs: one new pass for every forward."""


# -- rows --------------------------------------------------------------------------------------------------------------


def windows(config: Config, student: Student, rows: Sequence[TextRow]) -> Callable[[int], list[Batch]]:
    """step -> the micro-batches of that step, in the order that the run's seed gives; packed by `text.pack_length`."""
    optim, order = config.optim, shuffled(len(rows), config.optim.rows, config.seed)
    pad_id, device = student.chat.pad_id, student.path.model.device
    return lambda step: micro_batches(rows, order(step), optim.micro_rows, pad_id, device, config.text.pack_length)


def held_out_batches(config: Config, student: Student, rows: Sequence[TextRow]) -> list[Batch]:
    """The first `HELD_OUT_ROWS` rows, one a line."""
    few = rows[:HELD_OUT_ROWS]
    pad_id, device = student.chat.pad_id, student.path.model.device
    return micro_batches(few, np.arange(len(few)), config.optim.micro_rows, pad_id, device)


# -- routing -----------------------------------------------------------------------------------------------------------


def native_pass(path: StudentPath, batch: Batch) -> RoutingPass:
    """Every layer keeps its own gate, at the served K."""
    return path.native(path.tier.k, batch.decoded_BT, batch.start_BT)


def student_pass(path: StudentPath, batch: Batch) -> RoutingPass:
    """The heads' predictions route, as serving does."""
    return path.predicted(batch.decoded_BT, batch.start_BT)


# -- at the labels -----------------------------------------------------------------------------------------------------


def hidden_at_labels(path: StudentPath, batch: Batch, routing: RoutingPass) -> torch.Tensor:
    """Final hidden states [N, H] at the completions' labels."""
    output = path.hidden(batch.input_ids_BT, routing, use_cache=False)
    hidden_NH: torch.Tensor = output.last_hidden_state[batch.labels_BT != IGNORE]
    return hidden_NH


def labels_of(batch: Batch) -> torch.Tensor:
    """The completions' tokens [N], in the order of `hidden_at_labels`."""
    return batch.labels_BT[batch.labels_BT != IGNORE]


def summed_cross_entropy(path: StudentPath, batch: Batch, routing: RoutingPass) -> torch.Tensor:
    """Of the completions' tokens, in the pass that `routing` describes."""
    return chunked(cross_entropy, hidden_at_labels(path, batch, routing), path.model.lm_head, labels_of(batch))


def completion_loss(path: StudentPath, batch: Batch, routing: MakePass = student_pass) -> torch.Tensor:
    """Summed cross-entropy of the completions' tokens, on the student path unless `routing` is another."""
    return summed_cross_entropy(path, batch, routing(path, batch))


@torch.no_grad()
def mean_loss(path: StudentPath, batches: Sequence[Batch], routing: MakePass = student_pass) -> float:
    """Mean held-out cross-entropy per completion token."""
    return sum(float(completion_loss(path, batch, routing)) for batch in batches) / sum(b.valid for b in batches)
