"""The optimizer loop: equal windows however they are cut, loud failures."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.checkpoint import checkpoints
from edge0_train.loop import Backward, learning_rate, train
from tests.train.toy_loop import LENGTHS, OPTIM, ROWS, Micro, Toy, cut, data, metrics, run_in, same

# -- windows -----------------------------------------------------------------------------------------------------------


def plain_training(steps: int) -> tuple[list[torch.Tensor], list[float]]:
    """Plain torch: the mean over all tokens of the window, one backward."""
    toy, losses = Toy(), []
    optimizer = torch.optim.AdamW(toy.model.parameters(), lr=OPTIM.lr, weight_decay=OPTIM.weight_decay)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate(OPTIM, step)
        x, y = (torch.cat([getattr(row, name) for row in data(step)]) for name in ("x_ND", "y_N"))
        loss = ((toy.model(x)[:, 0] - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(toy.model.parameters(), OPTIM.clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    return toy.values(), losses


@pytest.mark.parametrize("micro_rows", [1, 2, 3, 4, 8])
def test_any_cut_of_the_window_is_the_plain_mean_over_all_tokens(tmp_path, micro_rows):
    toy, run = Toy(micro_rows), run_in(tmp_path / "run")
    train(run, OPTIM, toy.objective())
    want, losses = plain_training(OPTIM.steps)
    for a, b in zip(toy.values(), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert [row["loss"] for row in metrics(run)] == pytest.approx(losses, rel=1e-6)
    assert toy.calls == OPTIM.steps * math.ceil(ROWS / micro_rows)


def test_metrics_are_per_valid_token_and_the_summary_counts_tokens(tmp_path):
    toy, run = Toy(), run_in(tmp_path / "run", every=4)
    summary = train(run, OPTIM, toy.objective(evaluate=lambda step: {"held_out": float(step)}))
    rows = metrics(run)
    assert [row["step"] for row in rows] == [4, 6] and [row["held_out"] for row in rows] == [4.0, 6.0]
    assert all(row["valid_tokens"] == sum(LENGTHS) for row in rows)
    start = Toy()
    x, y = (torch.cat([getattr(row, name) for row in data(0)]) for name in ("x_ND", "y_N"))
    first = run_in(tmp_path / "first")
    train(first, replace(OPTIM, steps=1), Toy().objective())
    error = (start.model(x)[:, 0] - y).detach()
    assert metrics(first)[0]["absolute"] == pytest.approx(float(error.abs().mean()), rel=1e-6)
    assert metrics(first)[0]["lr"] == pytest.approx(OPTIM.lr / 2)
    assert summary["tokens"] == OPTIM.steps * 2 * sum(LENGTHS) and summary["steps"] == OPTIM.steps


def test_clip_zero_means_no_clipping(tmp_path):
    norms = []
    for clip in (0.0, 1e9, 1e-3):
        toy, run = Toy(), run_in(tmp_path / str(clip))
        train(run, replace(OPTIM, clip=clip, steps=3), toy.objective())
        norms.append((toy.values(), metrics(run)[-1]["gradient_norm"]))
    assert same(norms[0][0], norms[1][0]) and norms[0][1] == norms[1][1]
    assert norms[2][1] > 1e-3  # the logged norm is the one before clipping


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("warmup", [0, 5, 50])
def test_learning_rate(schedule, warmup):
    optim = replace(OPTIM, steps=50, lr=2.0, warmup=warmup, schedule=schedule)
    rates = [learning_rate(optim, step) for step in range(50)]
    assert rates[:warmup] == pytest.approx([2.0 * (n + 1) / warmup for n in range(warmup)])
    rest = rates[warmup:]
    if schedule == "constant":
        assert rest == [2.0] * len(rest)
    elif rest:
        want = [2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * n / len(rest))) / 2) for n in range(len(rest))]
        assert rest == pytest.approx(want)
        assert rest[0] == 2.0 and rest == sorted(rest, reverse=True) and 0.2 < rest[-1] < 0.21
    assert all(rate > 0 for rate in rates)


def test_rate_is_set_once_a_step_and_is_the_resumed_steps_own(tmp_path):
    run = run_in(tmp_path / "run")
    train(run, OPTIM, Toy().objective())
    assert [row["lr"] for row in metrics(run)] == [learning_rate(OPTIM, step) for step in range(OPTIM.steps)]


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run_before_the_step(tmp_path, bad):
    toy = Toy()

    def loss(micro: Micro, backward: Backward) -> dict[str, float]:
        fifth = toy.calls == 4  # the second micro-batch of step 2
        return toy.loss(micro, lambda value: backward(value * (bad if fifth else 1.0)))

    run = run_in(tmp_path / "run", checkpoint_every=1)
    with pytest.raises(Edge0Error, match=r"step 1: loss .*optim\.lr"):
        train(run, OPTIM, toy.objective(loss=loss))
    assert [p.name for p in checkpoints(run.checkpoints)] == ["step-00000001.safetensors"]
    once = Toy()
    train(run_in(tmp_path / "once"), replace(OPTIM, steps=1), once.objective())
    assert same(toy.values(), once.values())  # nothing was spoilt


def test_a_window_without_valid_token_stops_the_run(tmp_path):
    empty = Micro(torch.zeros(0, 4), torch.zeros(0))
    with pytest.raises(Edge0Error, match="step 0: no token"):
        train(run_in(tmp_path / "run"), OPTIM, Toy().objective(window=lambda step: [empty, empty]))


def test_one_micro_batch_without_valid_token_is_fine(tmp_path):
    """Short replies have no predicted position, so a micro-batch of phase 1 can be empty."""
    empty = Micro(torch.zeros(0, 4), torch.zeros(0))
    with_empty, without = Toy(), Toy()
    train(run_in(tmp_path / "a"), OPTIM, with_empty.objective(window=lambda s: [empty, *cut(data(s), 3), empty]))
    train(run_in(tmp_path / "b"), OPTIM, without.objective())
    assert same(with_empty.values(), without.values())


def test_a_trainable_that_the_loss_does_not_reach_is_named(tmp_path):
    toy = Toy()
    spare = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(Edge0Error, match=r"no gradient .*spare"):
        train(run_in(tmp_path / "run"), OPTIM, toy.objective(trainable=toy.parameters | {"spare": spare}))
