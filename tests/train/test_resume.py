"""Resume is exact: after a signal, after a kill."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from edge0_train.checkpoint import checkpoints
from edge0_train.loop import train
from edge0_train.stopping import Interrupted
from tests.train.toy_loop import OPTIM, Toy, cut, data, metrics, newest, run_in, same


@pytest.fixture
def straight(tmp_path: Path) -> tuple[list[torch.Tensor], list[dict[str, Any]], dict[str, Any]]:
    """Values, metrics and summary of an undisturbed run."""
    toy, run = Toy(), run_in(tmp_path / "straight")
    summary = train(run, OPTIM, toy.objective())
    return toy.values(), metrics(run), summary


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_stopping_by_a_signal_and_resuming_is_exact(tmp_path, straight, stop):
    """SIGTERM inside the first micro-batch of a step: the step is finished and kept, and nothing is done twice."""
    first = Toy(on_call=lambda n: os.kill(os.getpid(), signal.SIGTERM) if n == 3 * (stop - 1) + 1 else None)
    run = run_in(tmp_path / "run")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match=f"stopped by SIGTERM: step {stop} of {OPTIM.steps} is done and kept"):
        train(run, OPTIM, first.objective())
    assert signal.getsignal(signal.SIGTERM) is before
    assert [p.name for p in checkpoints(run.checkpoints)] == [f"step-{stop:08d}.safetensors"]
    second = Toy()
    with torch.no_grad():
        for p in second.parameters.values():
            p.add_(1.0)  # a resume takes nothing from where the new process happens to start
    resumed = run_in(tmp_path / "run", resume=True)
    train(resumed, OPTIM, second.objective())
    values, rows, _ = straight
    assert same(second.values(), values) and metrics(resumed) == rows
    assert second.calls == 3 * (OPTIM.steps - stop)
    state, want = newest(tmp_path / "run"), newest(tmp_path / "straight")
    assert state.keys() == want.keys() and len(state) == 4 * len(values)
    assert all(torch.equal(state[name], want[name]) for name in state)


@pytest.mark.parametrize("stop", [3, OPTIM.steps])
def test_the_summary_is_that_of_the_whole_run(tmp_path, straight, stop):
    """It goes into the artifact's provenance: tokens of all sessions, numbers of the last step, also when that one is done."""
    first = Toy(on_call=lambda n: os.kill(os.getpid(), signal.SIGTERM) if n == 3 * stop else None)
    with contextlib.suppress(Interrupted):
        train(run_in(tmp_path / "run"), OPTIM, first.objective())
    summary = train(run_in(tmp_path / "run", resume=True), OPTIM, Toy().objective())
    want = straight[2]
    drop = ("tokens_per_second",)
    assert {k: v for k, v in summary.items() if k not in drop} == {k: v for k, v in want.items() if k not in drop}


def test_a_kill_between_checkpoints_is_exact_too(tmp_path, straight):
    """SIGKILL (here: an exception) loses steps, not exactness; the lost steps' metric rows are forgotten."""

    class Killed(Exception):
        pass

    def die(n: int) -> None:
        if n == 3 * 4 + 2:  # in the middle of step 5's accumulation
            raise Killed

    run = run_in(tmp_path / "run", checkpoint_every=3)
    with pytest.raises(Killed):
        train(run, OPTIM, Toy(on_call=die).objective())
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4]
    second, resumed = Toy(), run_in(tmp_path / "run", resume=True, checkpoint_every=3)
    train(resumed, OPTIM, second.objective())
    assert same(second.values(), straight[0]) and metrics(resumed) == straight[1]
    assert second.calls == 3 * 3


def test_a_kill_before_the_first_checkpoint_starts_again_without_double_rows(tmp_path, straight):
    run = run_in(tmp_path / "run")
    with pytest.raises(ZeroDivisionError):
        train(run, OPTIM, Toy(on_call=lambda n: 1 // (n != 8)).objective())  # type: ignore[arg-type, return-value]
    second, resumed = Toy(), run_in(tmp_path / "run", resume=True)
    train(resumed, OPTIM, second.objective())
    assert same(second.values(), straight[0])
    assert metrics(resumed) == straight[1]


def test_a_metric_row_that_was_cut_short_does_not_stop_the_resume(tmp_path, straight):
    """A kill in the middle of a write leaves half a line."""
    run = run_in(tmp_path / "run", checkpoint_every=2)
    with pytest.raises(ZeroDivisionError):
        train(run, OPTIM, Toy(on_call=lambda n: 1 // (n != 8)).objective())  # type: ignore[arg-type, return-value]
    with (run.directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    second, resumed = Toy(), run_in(tmp_path / "run", resume=True, checkpoint_every=2)
    train(resumed, OPTIM, second.objective())
    assert same(second.values(), straight[0]) and metrics(resumed) == straight[1]


def test_resuming_a_finished_loop_does_nothing(tmp_path, straight):
    toy, run = Toy(), run_in(tmp_path / "straight", resume=True)
    train(run, OPTIM, toy.objective())
    assert toy.calls == 0 and same(toy.values(), straight[0])


def test_a_signal_in_the_last_step_stops_too_and_only_the_export_is_left(tmp_path, straight):
    """Of a chain, the phases after this one would run on."""
    toy = Toy(on_call=lambda n: os.kill(os.getpid(), signal.SIGINT) if n == 3 * OPTIM.steps else None)
    with pytest.raises(Interrupted, match=f"stopped by SIGINT: step {OPTIM.steps} of {OPTIM.steps}") as stopped:
        train(run_in(tmp_path / "run"), OPTIM, toy.objective())
    assert stopped.value.code == 130
    again = Toy()
    assert train(run_in(tmp_path / "run", resume=True), OPTIM, again.objective())["steps"] == OPTIM.steps
    assert again.calls == 0 and same(again.values(), straight[0])


def test_an_interruption_always_leaves_the_last_step_on_disk(tmp_path, monkeypatch):
    """The signal may come at any moment, also between the question whether to save and the question whether to stop."""
    asked = []

    def late() -> int:
        asked.append(1)
        return signal.SIGTERM if len(asked) >= 2 else 0  # seen for the first time by the second question ever asked

    @contextlib.contextmanager
    def signals():
        yield late

    monkeypatch.setattr("edge0_train.loop.polled", signals)
    run = run_in(tmp_path / "run")
    with pytest.raises(Interrupted) as stopped:
        train(run, OPTIM, Toy().objective())
    names = [p.name for p in checkpoints(run.checkpoints)]
    assert names, str(stopped.value)
    assert f"step {int(names[-1][5:13])} of" in str(stopped.value)


def test_a_signal_while_a_window_is_made_keeps_the_steps_before_it(tmp_path, straight):
    """on_policy writes its rollouts there, which takes long and stops by itself; no step since the checkpoint may be lost."""
    toy = Toy()

    def window(step: int) -> Any:
        if step == 3:
            raise Interrupted(signal.SIGTERM, "while rollouts were written")
        return cut(data(step), 3)

    run = run_in(tmp_path / "run")
    with pytest.raises(Interrupted):
        train(run, OPTIM, toy.objective(window=window))
    assert [p.name for p in checkpoints(run.checkpoints)] == ["step-00000003.safetensors"]
    again = Toy()
    train(run_in(tmp_path / "run", resume=True), OPTIM, again.objective())
    assert same(again.values(), straight[0]) and again.calls == 3 * (OPTIM.steps - 3)
