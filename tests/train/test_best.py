"""Early stopping: it ends where patience ends, keeps the best values, and decides the same after a resume."""

from __future__ import annotations

import math
import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.best import Best
from edge0_train.checkpoint import checkpoints
from edge0_train.loop import train
from edge0_train.stopping import Interrupted
from tests.train.toy_loop import OPTIM, Toy, metrics, run_in, same

PATIENT = replace(OPTIM, steps=12, patience=3)
HELD_OUT = [5.0, 4.0, 3.0, 3.5, 2.0, 2.0, 2.5, math.nan, 1.0, 1.0, 1.0, 1.0]
"""By step: the best is step 5 (the first of its equals); steps 6, 7 and 8 are no better, so step 9 is never done."""


def watched(toy: Toy, values: dict[int, list[torch.Tensor]] | None = None) -> Any:
    def evaluate(step: int) -> dict[str, float]:
        if values is not None:
            values[step] = toy.values()
        return {"held_out": HELD_OUT[step - 1]}

    return toy.objective(evaluate=evaluate, watch="held_out")


def test_best_equals_a_plain_count():
    random_ = random.Random(0)
    for _ in range(50):
        values = [random_.choice([1.0, 2.0, 3.0, math.nan]) for _ in range(random_.randint(1, 9))]
        finite = [(v, step) for step, v in enumerate(values, 1) if not math.isnan(v)]
        value, step = min(finite, default=(math.inf, 0))
        best = Best.of(enumerate(values, 1))
        assert (best.step, best.value, best.since) == (step, value, len(values) - step)


def test_it_stops_after_patience_and_keeps_the_best_values(tmp_path, capsys):
    toy, run, values = Toy(), run_in(tmp_path / "run"), {}
    summary = train(run, PATIENT, watched(toy, values))
    assert [row["step"] for row in metrics(run)] == list(range(1, 9))
    assert (summary["steps"], summary["best_step"], summary["held_out"]) == (8, 5, 2.0)
    assert same(toy.values(), values[5]) and not same(toy.values(), values[8])
    assert "kept: the values of step 5 of 8" in capsys.readouterr().out
    assert [p.name for p in (tmp_path / "run" / "checkpoints").glob("best-*")] == ["best-00000005.safetensors"]


def test_without_patience_nothing_is_watched(tmp_path):
    toy, run = Toy(), run_in(tmp_path / "run")
    summary = train(run, replace(PATIENT, patience=0), watched(toy))
    assert summary["steps"] == 12 and "best_step" not in summary
    assert not list((tmp_path / "run" / "checkpoints").glob("best-*"))


def test_the_best_of_a_run_that_is_not_stopped_is_kept_too(tmp_path):
    toy, values = Toy(), {}
    summary = train(run_in(tmp_path / "run"), replace(PATIENT, patience=9), watched(toy, values))
    assert (summary["steps"], summary["best_step"]) == (12, 9) and same(toy.values(), values[9])


@pytest.mark.parametrize("stop", [1, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("how", ["signal", "kill"])
def test_a_resumed_run_decides_as_an_uninterrupted_one(tmp_path, stop, how):
    """A signal leaves a checkpoint at the step; a kill loses the steps since the last one, some with better values."""
    straight = Toy()
    want = train(run_in(tmp_path / "straight"), PATIENT, watched(straight))

    class Killed(Exception):
        pass

    def strike(n: int) -> None:
        if n == 3 * (stop - 1) + 1:
            if how == "kill":
                raise Killed
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        train(run_in(tmp_path / "run", checkpoint_every=3), PATIENT, watched(Toy(on_call=strike)))
        assert stop == 8  # stopped by patience and by the signal at once: finished
    except (Interrupted, Killed):
        pass
    second, run = Toy(), run_in(tmp_path / "run", resume=True, checkpoint_every=3)
    summary = train(run, PATIENT, watched(second))
    assert same(second.values(), straight.values())
    drop = ("tokens_per_second",)
    assert {k: v for k, v in summary.items() if k not in drop} == {k: v for k, v in want.items() if k not in drop}
    left, right = (metrics(run_in(tmp_path / name)) for name in ("run", "straight"))
    assert repr(left) == repr(right)  # NaN is not equal to itself


def test_a_run_killed_between_stop_and_export_does_no_further_step(tmp_path):
    first = Toy()
    train(run_in(tmp_path / "run"), PATIENT, watched(first))
    again = Toy()
    summary = train(run_in(tmp_path / "run", resume=True), PATIENT, watched(again))
    assert again.calls == 0 and same(again.values(), first.values())
    assert (summary["steps"], summary["best_step"]) == (8, 5)


def test_damaged_best_values_are_named(tmp_path):
    directory = tmp_path / "run"
    train(run_in(directory), PATIENT, watched(Toy()))
    file = next((directory / "checkpoints").glob("best-*"))
    whole = file.read_bytes()
    for content in (whole[:50], b""):
        file.write_bytes(content)
        with pytest.raises(Edge0Error, match=r"best-00000005\.safetensors: .*another run_dir"):
            train(run_in(directory, resume=True), PATIENT, watched(Toy()))
    assert len(checkpoints(Path(directory) / "checkpoints")) == 1


def test_a_resume_from_the_older_checkpoint_has_its_best_values(tmp_path):
    """The newest checkpoint, at step 6, is damaged; at step 4 the best was step 3, and no later one is as good here."""
    values: dict[int, list[torch.Tensor]] = {}
    six = replace(PATIENT, steps=6)
    train(run_in(tmp_path / "run", checkpoint_every=2), six, watched(Toy(), values))
    directory = tmp_path / "run" / "checkpoints"
    assert [p.name for p in sorted(directory.glob("best-*"))] == [
        "best-00000003.safetensors",
        "best-00000005.safetensors",
    ]
    checkpoints(directory)[-1].write_bytes(b"")
    toy = Toy()
    worse = toy.objective(evaluate=lambda step: {"held_out": 9.0}, watch="held_out")
    summary = train(run_in(tmp_path / "run", resume=True, checkpoint_every=2), six, worse)
    assert summary["best_step"] == 3 and same(toy.values(), values[3])
