"""Where a training command ends: one sentence, an exit code that says what happened, and no directory that stands in the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.config import Config, configure
from edge0_train.config.grammar import hydra_sentence
from edge0_train.run import Run, read_summary
from edge0_train.stopping import Interrupted
from tests.train.command_line import exit_code

Command = Callable[..., tuple[object, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """(exit code, stdout, stderr) of `phase=quantize` below tmp_path, whose work is what `does(run)` does."""
    monkeypatch.chdir(tmp_path)

    def run(does: Callable[[Run], Any] | None, *arguments: str) -> tuple[object, str, str]:
        if does:
            monkeypatch.setattr("edge0_train.phases.phase_function", lambda name: lambda config, run: does(run) or {})
        overrides = ("phase=quantize", f"root={tmp_path / 'root'}", *arguments)
        capfd.readouterr()
        return exit_code(monkeypatch, *overrides), *capfd.readouterr()

    return run


def raises(error: BaseException) -> Callable[[Run], None]:
    def does(_: Run) -> None:
        raise error

    return does


OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {})
UsageError = type("UsageError", (Exception,), {"__module__": "wandb.errors"})
FOREIGN: dict[str, tuple[BaseException, int, str]] = {
    "ours": (Edge0Error("tier: x is wrong; mend it"), 2, "error: tier: x is wrong; mend it"),
    "no CUDA": (AssertionError("Torch not compiled with CUDA enabled"), 2, "base.device=cpu base.dtype=float32"),
    "no driver": (RuntimeError("Found no NVIDIA driver on your system."), 2, "base.device: cuda cannot be used"),
    "device memory": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 2, "optim.micro_rows"),
    "host memory": (
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        2,
        "base.storage=packed",
    ),
    "W&B": (UsageError("No API key configured.\nUse `wandb login`"), 2, "logger.wandb=offline"),
    "full disk": (
        OSError(28, "No space left on device", "a/b"),
        2,
        "error: a/b: No space left on device (ENOSPC); free",
    ),
    "full disk, safetensors": (SafetensorError("I/O error: No space left (os error 28)"), 2, "free space"),
    "unknown": (ValueError("seven\nlines"), 3, "error: ValueError at "),
    "exit": (SystemExit(5), 5, ""),
}


@pytest.mark.parametrize(("error", "code", "says"), FOREIGN.values(), ids=FOREIGN)
def test_what_a_phase_raises_is_one_sentence_and_the_corrected_command_runs(command, tmp_path, error, code, says):
    found, _, said = command(raises(error))
    lines = [line for line in said.splitlines() if line]
    assert found == code and says in said and len(lines) <= 1 and "Traceback" not in said
    assert not (tmp_path / "root/quantize").exists()
    assert command(lambda run: {})[0] == 0 and (tmp_path / "root/quantize/done.json").exists()


def test_debug_prints_the_traceback_and_is_no_setting(command):
    code, _, said = command(raises(ValueError("x")), "--debug")
    assert code == 3 and "Traceback" in said and "in does" in said
    assert command(lambda run: {}, "--debug")[0] == 0


def test_a_command_that_hydra_refuses_ends_the_same_way(command):
    code, _, said = command(None, "optim.learning_rate=1")
    assert code == 2 and said == (
        "error: optim.learning_rate: no such setting; did you mean optim.lr? `python -m edge0_train settings` has all\n"
    )
    code, _, said = command(None, "optim.lr=[")
    assert code == 2 and said.startswith("error: optim.lr=[: cannot be read (") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("optm.lr=1", "optim.lr=1"), ("optim.warm_up=3", "optim.warmup=3"), ("lr=1", "optim.lr=1"), ("sed=3", "seed=3")],
)
def test_an_unknown_setting_is_told_the_one_that_was_meant(wrong, right):
    with pytest.raises(Edge0Error, match=f"did you mean {right.partition('=')[0]}\\?"):
        configure(wrong)
    configure(right)


def test_hydras_own_advice_is_not_passed_on():
    with pytest.raises(
        Edge0Error, match=r"nothing\.like\.it: no such setting; .*`python -m edge0_train settings` has all$"
    ):
        configure("nothing.like.it=1")
    assert "(some other text)" in hydra_sentence(ValueError("some\nother  text"))


# -- signals -----------------------------------------------------------------------------------------------------------

STOPS: dict[str, tuple[Callable[[Run], Any], int, str]] = {
    "Ctrl-C": (lambda run: signal.raise_signal(signal.SIGINT), 130, "stopped by Ctrl-C"),
    "SIGTERM": (lambda run: signal.raise_signal(signal.SIGTERM), 143, "stopped by SIGTERM"),
    "between steps": (raises(Interrupted(15, "stopped by SIGTERM: step 3 of 6 is done and kept")), 143, "step 3 of 6"),
}


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("does", "code", "says"), STOPS.values(), ids=STOPS)
def test_a_stop_tells_the_command_that_continues_and_it_does(command, tmp_path, does, code, says, kept):
    def stopped(run: Run) -> Any:
        if kept:
            run.log(3, {"loss": 1.0})
        return does(run)

    found, _, said = command(stopped, "optim.lr=1e-2")
    told = said.splitlines()[-1]
    assert found == code and told.startswith("stopped by") and says in told
    assert (tmp_path / "root/quantize").exists() == kept
    advice = told.rpartition("continue with: python -m edge0_train ")[2].split()
    assert advice == ["phase=quantize", f"root={tmp_path / 'root'}", "optim.lr=1e-2", "resume=true"]
    assert command(lambda run: {"rows": len(run.metrics())}, *advice[2:])[0] == 0
    assert json.loads((tmp_path / "root/quantize/done.json").read_text())["rows"] == int(kept)


def test_stdout_that_nobody_reads_does_not_look_like_the_end_of_a_training(command):
    """Into `| head`: it must not exit with 0."""
    code, _, said = command(raises(BrokenPipeError()))
    assert code == 2 and said.startswith("error: stdout: nobody reads it any more") and "resume=true" in said


# -- damaged files -----------------------------------------------------------------------------------------------------


@pytest.fixture
def stopped(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A run of student_sft with every file that it writes before its end."""
    monkeypatch.setattr("edge0_train.build.input_identity", lambda config: {"teacher": {"name": "t"}})
    monkeypatch.setattr("edge0_train.inputs.check_inputs", lambda config: None)  # there is no base
    config = configure("phase=student_sft", f"root={tmp_path / 'root'}", "logger.wandb=disabled")

    def does(run: Run) -> None:
        run.log(1, {"loss": float("nan")})
        run.log(2, {"loss": 0.5})
        os.kill(os.getpid(), signal.SIGTERM)

    assert command(does, "phase=student_sft", "logger.wandb=disabled")[0] == 143
    return config


DAMAGED = {
    "done.json": ["", "{", "[]", '{"a": NaN}'],
    "inputs.json": ["", "null", '{"a": 1, "a": 2}'],
    "metrics.jsonl": ["{\n", '{"step": 1}\n\n{"step": 2}\n', '{"loss": 1}\n', "[1]\n"],
    "config.yaml": ["", "a: [", "- 1"],
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named_and_what_is_advised_goes_on(command, stopped, name):
    file = Path(stopped.run_dir) / name

    def resumed(*more: str) -> tuple[object, str, str]:
        settings = ("phase=student_sft", "logger.wandb=disabled", "resume=true", *more)
        return command(lambda run: {"last": run.forget_after(2)}, *settings)

    for content in DAMAGED[name]:
        file.write_text(content)
        code, _, said = resumed()
        assert code == 2 and said.count("\n") == 1 and str(file) in said, said
    if name == "config.yaml":
        assert "restore it, or choose another run_dir" in said
        assert resumed(f"run_dir={stopped.run_dir}-2")[0] == 0
    elif name == "metrics.jsonl":
        assert "line 1: not a metric row (has no step); delete that line, and continue with resume=true" in said
        file.write_text("")
        assert resumed()[0] == 0
    else:
        assert "delete it, and continue with resume=true" in said
        file.unlink()
        assert resumed()[0] == 0
        assert read_summary(Path(stopped.run_dir))["last"] == {"loss": 0.5}


def test_what_is_not_finite_is_written_as_strict_json(stopped):
    rows = [json.loads(line) for line in (Path(stopped.run_dir) / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 1, "loss": None}, {"step": 2, "loss": 0.5}]
    run = Run(Path(stopped.run_dir), SimpleNamespace(phase="x"))  # type: ignore[arg-type]
    run.finish({"table": [{"kl": float("inf")}], "pair": (1.0, float("nan"))})
    summary = read_summary(run.directory)
    assert summary and summary["table"] == [{"kl": None}] and summary["pair"] == [1.0, None]


# -- advices -----------------------------------------------------------------------------------------------------------


def test_an_advice_to_change_a_setting_says_what_becomes_of_the_directory(command, tmp_path):
    """ "train longer" in a directory that then refuses led nowhere: each of the three ways that it names works."""

    def short(run: Run) -> dict[str, Any]:
        run.log(1, {"loss": 1.0})
        if run.config.optim.steps < 3:
            raise Edge0Error("heads: do not beat the baseline; train longer (optim.steps=2)")
        return {}

    place = tmp_path / "root/quantize"
    code, _, said = command(short, "optim.steps=2")
    assert code == 2 and said == (
        f"error: heads: do not beat the baseline; train longer (optim.steps=2); {place} keeps what was finished: resume=true"
        " continues it; for other settings delete it, or choose another run_dir\n"
    )
    assert "optim.steps: saved 2, now 3" in command(short, "optim.steps=3", "resume=true")[2]
    assert command(lambda run: {}, "optim.steps=2", "resume=true")[0] == 0
    assert command(short, "optim.steps=3", f"run_dir={tmp_path / 'other'}")[0] == 0
    shutil.rmtree(place)
    assert command(short, "optim.steps=3")[0] == 0


def test_an_advice_that_names_the_directory_already_is_left_alone(command):
    def full(run: Run) -> None:
        run.log(1, {"loss": 1.0})
        raise Edge0Error("metrics.jsonl: no room; free space and continue with resume=true")

    assert command(full)[2] == "error: metrics.jsonl: no room; free space and continue with resume=true\n"
