"""Being asked to stop, and two processes at one directory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra._internal.config_loader_impl import ConfigLoaderImpl

from edge0_runtime.contract.edge import Stopped, held, terminable
from edge0_runtime.contract.errors import Edge0Error
from edge0_train.cli import main
from edge0_train.config import Config, configure
from edge0_train.data.rows import TextRow, read_rows
from edge0_train.data.writing import write_shards
from edge0_train.objectives.scoring import score
from edge0_train.run import open_run
from edge0_train.stopping import Interrupted, leave_together, polled
from edge0_train.student import Completion

ROOT = Path(__file__).parents[2]


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_ends_at_once(number, capfd):
    before = handlers()
    noted = []
    with terminable(), contextlib.suppress(Stopped, KeyboardInterrupt), polled() as stopped:
        noted.append(stopped())
        signal.raise_signal(number)
        with polled() as inner:
            noted += [stopped(), inner()]
        signal.raise_signal(number)
        noted.append(-1)
    assert noted == [0, number, number]
    assert "a second signal stops at once" in capfd.readouterr().err and handlers() == before


def test_a_signal_that_nobody_has_obeyed_is_not_lost():
    """It came after the last question: a chain must not go on to the next phase."""
    with terminable(), pytest.raises(Stopped, match="stopped by SIGTERM"), polled():
        signal.raise_signal(signal.SIGTERM)
    with polled() as stopped:
        assert not stopped()


def test_leaving_tells_the_signal_and_what_is_kept():
    leave_together(0, "nothing")
    with pytest.raises(Interrupted, match="stopped by SIGTERM: 3 of 4 are kept") as stop:
        leave_together(signal.SIGTERM, "3 of 4 are kept")
    assert stop.value.code == 143


# -- between shards ----------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return configure("phase=teacher_text", f"root={tmp_path / 'root'}", "sample.batch=2")


class Ids:
    """A chat whose prompts are their own ids."""

    def prompt_ids(self, prompt: Any) -> tuple[int, ...]:
        return tuple(prompt.ids)


class APrompt:
    task = answer = ""

    def __init__(self, number: int) -> None:
        self.ids = (number,)


def test_a_signal_between_shards_keeps_those_that_are_finished(config, tmp_path):
    """Heard while the second batch is written: that one is finished, no third one begins, and the rest comes on resume."""
    asked: list[int] = []

    def writer(prompts: Any, seed: int) -> list[Completion]:
        asked.append(seed)
        if len(asked) == 2:
            signal.raise_signal(signal.SIGTERM)
        return [Completion((len(asked),), "stop") for _ in prompts]

    prompts: Any = [APrompt(n) for n in range(7)]
    with pytest.raises(Interrupted, match="2 of 4 batches of teacher_text train are kept"):
        write_shards(config, tmp_path / "shards", writer, Ids(), prompts, "train")  # type: ignore[arg-type]
    kept = sorted((tmp_path / "shards").iterdir())
    assert len(asked) == 2 and [row.prompt_ids for file in kept for row in read_rows(file)] == [(0,), (1,), (2,), (3,)]
    rows = write_shards(config, tmp_path / "shards", writer, Ids(), prompts, "train")  # type: ignore[arg-type]
    assert len(asked) == 4 == len(set(asked)) and [row.prompt_ids[0] for row in rows] == list(range(7))


def test_a_signal_between_scored_batches_keeps_those_that_are_finished(config, tmp_path, monkeypatch):
    asked: list[int] = []

    def scores(teacher: Any, batch: Any, top_k: int) -> dict[str, torch.Tensor]:
        asked.append(len(batch.rows))
        if len(asked) == 2:
            signal.raise_signal(signal.SIGINT)
        names = ("ids_CS", "logp_CS", "log_tail_C", "sampled_C", "sampled_logp_C")
        return {name: torch.zeros(len(batch.rows)) for name in names} | {
            "lengths": torch.ones(len(batch.rows), dtype=int)
        }

    monkeypatch.setattr("edge0_train.objectives.scoring.teacher_scores", scores)

    class Teacher:
        class model:
            device = "cpu"

    def scorer(write: Any) -> None:
        write(Teacher)

    rollout = [TextRow((n,), (n,), "stop") for n in range(7)]
    with pytest.raises(Interrupted, match="the scores of 2 of 4 batches are kept"):
        score(config, tmp_path, scorer, 0, rollout)  # type: ignore[arg-type]
    assert len(score(config, tmp_path, scorer, 0, rollout)) == 7 and asked == [2, 2, 2, 1]  # type: ignore[arg-type]


# -- two processes -----------------------------------------------------------------------------------------------------

HOLD = """
import sys
from edge0_train.config import configure
from edge0_train.run import open_run

run = open_run(configure("phase=teacher_text", sys.argv[1], "sample.batch=2", "resume=true"))
print("open", flush=True)
sys.stdin.readline()
"""


def holding(root: Path) -> subprocess.Popen[str]:
    """Another process that has the run open until it is killed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, f"root={root}"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stdout.readline() == "open\n"
    return process


@pytest.mark.parametrize("resume", ["true", "false"])
def test_a_second_process_is_refused_until_the_first_one_is_dead(config, tmp_path, resume):
    process = holding(tmp_path / "root")
    try:
        with pytest.raises(
            Edge0Error, match=rf"run_dir: .* is in use by process {process.pid} on .*choose another"
        ) as error:
            open_run(configure("phase=teacher_text", f"root={tmp_path / 'root'}", f"resume={resume}"))
        assert "\n" not in str(error.value)
        assert (Path(config.run_dir) / "config.yaml").exists()  # who is refused removes nothing
    finally:
        process.kill()  # as the system does when memory runs out
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe
            pipe.close()
    with open_run(config) as run:
        assert f"process {os.getpid()} on" in (run.directory / "lock").read_text()
        run.log(1, {})


def test_a_closed_run_lets_another_process_in(config, tmp_path):
    with open_run(config) as run:
        run.log(1, {})
    process = holding(tmp_path / "root")
    process.kill()
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_a_library_that_would_take_it_for_an_error_of_its_own(number):
    done = []

    def masked() -> None:
        with terminable(), held():
            try:
                signal.raise_signal(number)
                done.append("composed")
            except BaseException:  # as OmegaConf does
                raise ValueError("a library's own") from None

    def released() -> None:
        with terminable(), held() as release:
            signal.raise_signal(number)
            release()
            done.append("after it")

    for case in (masked, released):
        with pytest.raises((KeyboardInterrupt, Stopped)):
            case()
    assert done == ["composed"]


def test_a_stop_while_hydra_composes_is_a_stop(monkeypatch, capsys):
    def masking(*args: object, **options: object) -> object:
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException:
            raise ValueError("a library's own") from None
        return real(*args, **options)

    real = ConfigLoaderImpl.load_configuration
    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", masking)
    monkeypatch.setattr(sys, "argv", ["edge0_train", "phase=quantize", "dry_run=true"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 143 and "continue with: python -m edge0_train phase=quantize" in capsys.readouterr().err
