"""What all phases share: windows, routings, and that a loss of phase 3 is one entry in losses.py."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from edge0_train import losses
from edge0_train.adapters import input_path
from edge0_train.build import Student, build_student
from edge0_train.data.rows import Batch, collate, shuffled
from edge0_train.objectives import (
    lora_parameters,
    mean_loss,
    native_pass,
    on_policy_objective,
    student_objective,
    student_pass,
)
from edge0_train.objectives.passes import HELD_OUT_ROWS, held_out_batches, windows
from edge0_train.objectives.scoring import Scored
from tests.train.conftest import Make, task_rows

SMALL = ("optim.rows=6", "optim.micro_rows=4")


@pytest.fixture(scope="module")
def student(make_config: Make) -> Student:
    config = make_config("student_sft")
    return build_student(config, prerouter=input_path(config, "prerouter"), new_lora=True)


def test_a_window_is_the_steps_rows_cut_in_order(make_config, student):
    config, rows = make_config("student_sft", *SMALL, "seed=3"), task_rows("train", 10)
    for step in (0, 1, 4):
        wanted = [rows[i] for i in shuffled(10, 6, 3)(step)]
        found = windows(config, student, rows)(step)
        assert [len(batch.rows) for batch in found] == [4, 2]
        assert [row for batch in found for row in batch.rows] == wanted
    packed = windows(make_config("student_sft", *SMALL, "text.pack_length=128"), student, rows)(0)
    assert len(packed[0].input_ids_BT) < 4 == len(packed[0].rows)


def test_held_out_batches_are_the_first_rows_one_a_line(make_config, student):
    config, rows = make_config("student_sft", *SMALL, "text.pack_length=128"), task_rows("eval", HELD_OUT_ROWS + 3)
    found = held_out_batches(config, student, rows)
    assert [row for batch in found for row in batch.rows] == rows[:HELD_OUT_ROWS]
    assert all(len(batch.input_ids_BT) == len(batch.rows) for batch in found)


def test_the_two_routings(student):
    batch = collate(task_rows("train", 2), 0)
    native, own = native_pass(student.path, batch), student_pass(student.path, batch)
    assert native.k == own.k == student.path.tier.k
    assert native.predicted_BT is None and own.predicted_BT is not None and bool(own.predicted_BT.any())
    assert mean_loss(student.path, [batch], native_pass) < mean_loss(student.path, [batch])


def test_the_student_objective_watches_what_it_is_told_to(make_config, student):
    config, rows = make_config("student_sft", *SMALL, "heads.joint_lr=0.25"), task_rows("train", 6)
    held_out: list[Batch] = held_out_batches(config, student, task_rows("eval", 3))
    watching = student_objective(config, student, rows, held_out)
    heads = watching.trainable.keys() - lora_parameters(student.path).keys()
    assert heads and watching.rates == dict.fromkeys(sorted(heads), 0.25)
    assert watching.evaluate and watching.evaluate(1) == {watching.watch: mean_loss(student.path, held_out)}
    blind = student_objective(config, student, rows)
    assert blind.evaluate is None and blind.watch == ""


def test_a_loss_of_phase_3_is_one_entry(make_config, student, monkeypatch):
    """The objective finds function and targets in the registry; it knows no loss by name."""
    given: list[tuple[torch.Tensor, ...]] = []

    def squared(logits_NV: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        given.append(targets)
        return logits_NV.square().mean()

    new = losses.OnPolicyLoss(squared, ("sampled_logp_C", "ids_CS"))
    monkeypatch.setitem(losses.ON_POLICY_LOSSES, "squared", new)
    config = make_config("on_policy", "optim.steps=2", "on_policy.rounds=2", *SMALL)
    config = dataclasses.replace(config, on_policy=dataclasses.replace(config.on_policy, loss="squared"))
    rows, asked = task_rows("train", 6), []

    def prepared(number: int):
        asked.append(number)
        return rows, [scores(len(row.completion_ids), at) for at, row in enumerate(rows)]

    objective = on_policy_objective(config, student, prepared)
    first, second = objective.window(0)
    order = shuffled(6, 6, config.seed)(0)
    assert [*first.batch.rows, *second.batch.rows] == [rows[i] for i in order]
    parts: list[float] = []
    said = objective.loss(first, lambda loss: parts.append(float(loss.detach())))
    assert len(parts) == 1 and parts[0] > 0 and said.keys() == {"teacher_mass", "student_mass"}
    ((logp, ids),) = given
    assert torch.equal(logp, first.scored.sampled_logp_C) and torch.equal(ids, first.scored.ids_CS)
    objective.window(1)
    assert asked == [0, 1]


def scores(tokens: int, at: int) -> Scored:
    """A teacher's view of so many tokens that tells the rows apart."""
    ids = torch.arange(2).expand(tokens, 2) + at
    logp = torch.full((tokens, 2), float(np.log(0.4)))
    one = torch.full((tokens,), -1.0 - at)
    return Scored(ids, logp, one, torch.full((tokens,), at), one)
