"""Resume is exact: after a signal, a kill, from damaged checkpoints not at all."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.checkpoint import KEEP, checkpoints, load_checkpoint, save_checkpoint
from edge0_train.loop import Interrupted, train
from tests.train.toy_loop import OPTIM, Toy, metrics, newest, run_in, same


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
    with pytest.raises(Interrupted, match=f"after step {stop}"):
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


def test_a_signal_after_the_last_step_does_not_stop_the_phase(tmp_path):
    toy = Toy(on_call=lambda n: os.kill(os.getpid(), signal.SIGINT) if n == 3 * OPTIM.steps else None)
    assert train(run_in(tmp_path / "run"), OPTIM, toy.objective())["steps"] == OPTIM.steps


def test_an_interruption_always_leaves_the_last_step_on_disk(tmp_path, monkeypatch):
    """The signal may come at any moment, also between the question whether to save and the question whether to stop."""
    asked = []

    def late() -> bool:
        asked.append(1)
        return len(asked) >= 2  # seen for the first time by the second question ever asked

    import edge0_train.loop as loop

    @loop.contextmanager  # type: ignore[attr-defined]
    def signals():
        yield late

    monkeypatch.setattr(loop, "_stop_signals", signals)
    run = run_in(tmp_path / "run")
    with pytest.raises(Interrupted) as stopped:
        train(run, OPTIM, Toy().objective())
    names = [p.name for p in checkpoints(run.checkpoints)]
    assert names, str(stopped.value)
    assert f"after step {int(names[-1][5:13])};" in str(stopped.value)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def trained(directory: Path) -> Path:
    """checkpoints/ of a run that saved after every step."""
    run = run_in(directory, checkpoint_every=1)
    train(run, OPTIM, Toy().objective())
    return run.checkpoints


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    assert KEEP == 2
    directory = trained(tmp_path / "run")
    assert [p.name for p in sorted(directory.iterdir())] == ["step-00000005.safetensors", "step-00000006.safetensors"]


@pytest.mark.parametrize("left", [0, 7, 100, -1])
def test_a_truncated_checkpoint_is_named(tmp_path, left):
    file = checkpoints(trained(tmp_path / "run"))[-1]
    file.write_bytes(file.read_bytes()[:left])
    toy = Toy()
    before = toy.values()
    with pytest.raises(Edge0Error, match=file.name):
        train(run_in(tmp_path / "run", resume=True), OPTIM, toy.objective())
    assert same(toy.values(), before)


OTHER_TENSORS: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "stranger": lambda tensors: tensors | {"value:other": torch.zeros(1)},
    "lacking": lambda tensors: {k: v for k, v in tensors.items() if k != "value:0.bias"},
    "shape": lambda tensors: tensors | {"value:0.bias": torch.zeros(7)},
}


@pytest.mark.parametrize("change", OTHER_TENSORS.values(), ids=OTHER_TENSORS)
def test_a_checkpoint_of_other_tensors_is_refused(tmp_path, change):
    file = checkpoints(trained(tmp_path / "run"))[-1]
    save_file(change(load_file(str(file))), str(file), metadata={"step": "6"})
    toy = Toy()
    with pytest.raises(Edge0Error, match=file.name):
        load_checkpoint(file, toy.parameters, torch.optim.AdamW(toy.model.parameters()))


def test_a_checkpoint_without_a_step_is_refused(tmp_path):
    file = checkpoints(trained(tmp_path / "run"))[-1]
    save_file(load_file(str(file)), str(file))
    toy = Toy()
    with pytest.raises(Edge0Error, match=file.name):
        load_checkpoint(file, toy.parameters, torch.optim.AdamW(toy.model.parameters()))


def test_files_that_are_no_checkpoints_are_left_alone(tmp_path):
    directory = trained(tmp_path / "run")
    for name in ("step-9.safetensors", ".step-00000009.safetensors.12-ab.tmp", "notes.txt"):
        (directory / name).write_text("x")
    toy = Toy()
    save_checkpoint(directory, 7, 0, toy.parameters, torch.optim.AdamW(toy.model.parameters()))
    assert len(list(directory.iterdir())) == KEEP + 3
    assert [p.name for p in checkpoints(directory)][-1] == "step-00000007.safetensors"
