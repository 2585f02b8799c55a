"""Head distillation: all heads in one pass over the base, without gradients through it (docs/method.md 2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from edge0_train.build import Student
from edge0_train.config import Config
from edge0_train.data.rows import Batch, TextRow
from edge0_train.loop import Backward, Objective
from edge0_train.losses import HEAD_LOSSES
from edge0_train.objectives.passes import MakePass, windows
from edge0_train.student import PrerouterHeads, RoutingPass, StudentPath


@dataclass(frozen=True)
class HeadBatch:
    """A batch whose loss runs over (predicted input, head) pairs."""

    batch: Batch
    predicted_BT: torch.Tensor
    heads: int

    @classmethod
    def of(cls, path: StudentPath, batch: Batch) -> HeadBatch:
        """`batch` under the timeline that the path's tier serves with."""
        return cls(batch, path.timeline(batch.decoded_BT, batch.start_BT)[0], len(path.tier.owners))

    @property
    def valid(self) -> int:
        """Pairs that the loss is summed over."""
        return int(self.predicted_BT.sum()) * self.heads

    @property
    def tokens(self) -> int:
        """Inputs of the batch without padding, each counted once for all heads."""
        return self.batch.tokens


def head_objective(
    config: Config, student: Student, heads: PrerouterHeads, rows: Sequence[TextRow], routing: MakePass
) -> Objective:
    """`heads` against the next layers' true routers, by `heads.loss`, on the features of a base that runs under `routing`.

    Args:
        routing: `native_pass`, a base that routes correctly; or `student_pass`, where the heads see what their own
            predictions make of the hidden states (`heads` are the student's then).
    """
    path, batches = student.path, windows(config, student, rows)
    trainable = dict(heads.requires_grad_(True).named_parameters())

    def loss(micro: HeadBatch, backward: Backward) -> dict[str, float]:
        distill(path, heads, routing(path, micro.batch), micro, config.heads.loss, backward)
        return {}

    return Objective(trainable, lambda step: [HeadBatch.of(path, batch) for batch in batches(step)], loss)


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
