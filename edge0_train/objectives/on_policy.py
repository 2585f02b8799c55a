"""The student path on its own completions, against the teacher's view of them (docs/method.md 2.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from edge0_train.build import Student
from edge0_train.config import Config
from edge0_train.data.rows import Batch, TextRow, collate, shuffled
from edge0_train.loop import Backward, Objective
from edge0_train.losses import ON_POLICY_LOSSES, chunked, mass_on
from edge0_train.objectives.passes import hidden_at_labels, student_pass
from edge0_train.objectives.scoring import Scored, join
from edge0_train.objectives.student import listening, lora_parameters, weigh_predictability
from edge0_train.student import StudentPath


@dataclass(frozen=True)
class ScoredBatch:
    """A batch of rollouts with the teacher's scores at every completion token, in the batch's order."""

    batch: Batch
    scored: Scored

    @property
    def valid(self) -> int:
        """Completion tokens: each has a score, and a term of the loss."""
        return self.batch.valid

    @property
    def tokens(self) -> int:
        """Inputs of the batch without padding."""
        return self.batch.tokens


def on_policy_objective(
    config: Config,
    student: Student,
    prepared: Callable[[int], tuple[Sequence[TextRow], Sequence[Scored]]],
    evaluate: Callable[[int], dict[str, float]] | None = None,
) -> Objective:
    """The LoRA on scored rollouts, by `on_policy.loss`; base and heads stay frozen.

    Args:
        prepared: round -> its rollout and the teacher's scores. It is asked for in every step; the first time is at the round's
            first step, when the student has the weights that are to write.
        evaluate: see `Objective`.
    """
    optim, path = config.optim, student.path
    steps = optim.steps // config.on_policy.rounds

    def window(step: int) -> list[ScoredBatch]:
        number, step_in_round = divmod(step, steps)
        rollout, scores = prepared(number)
        order = shuffled(len(rollout), optim.rows, config.seed + number)
        return scored_window(rollout, scores, order(step_in_round), optim.micro_rows, student)

    def loss(micro: ScoredBatch, backward: Backward) -> dict[str, float]:
        value, said = rollout_loss(path, config.on_policy.loss, micro, config.heads.predictability)
        backward(value)
        return said

    return Objective(lora_parameters(path), window, loss, evaluate)


def scored_window(
    rollout: Sequence[TextRow], scores: Sequence[Scored], indices: np.ndarray, micro_rows: int, student: Student
) -> list[ScoredBatch]:
    """The micro-batches of one step."""
    device = student.path.model.device
    parts = [indices[i : i + micro_rows] for i in range(0, len(indices), micro_rows)]
    return [
        ScoredBatch(
            collate([rollout[i] for i in part], student.chat.pad_id, device), join([scores[i] for i in part], device)
        )
        for part in parts
    ]


def rollout_loss(
    path: StudentPath, kind: str, micro: ScoredBatch, predictability: float = 0.0
) -> tuple[torch.Tensor, dict[str, float]]:
    """Summed loss on the student path; to log, the teacher's and the student's mass on the teacher's top-k.

    Args:
        kind: name in `ON_POLICY_LOSSES`.
    """
    batch, scored, chosen = micro.batch, micro.scored, ON_POLICY_LOSSES[kind]
    routing = listening(student_pass(path, batch), predictability)
    hidden_NH = hidden_at_labels(path, batch, routing)

    def with_mass(logits_NV: torch.Tensor, ids_NS: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        return torch.stack([chosen.function(logits_NV, *targets), mass_on(logits_NV, ids_NS)])

    targets = [getattr(scored, name) for name in chosen.targets]
    value, student_mass = chunked(with_mass, hidden_NH, path.model.lm_head, scored.ids_CS, *targets).unbind()
    said = {"teacher_mass": float(scored.logp_CS.exp().sum()), "student_mass": float(student_mass.detach())}
    return weigh_predictability(path, routing, predictability, value, said)
