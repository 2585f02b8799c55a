"""--multirun: every combination in a directory of its own, nothing left in the current one, and a table at the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.config import config_directory
from edge0_train.run import Run
from edge0_train.sweep import compared
from tests.train.command_line import exit_code

Sweep = Callable[..., tuple[object, str, str]]


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Sweep:
    """(exit code, stdout, stderr) of `--multirun` below tmp_path/root; a phase logs a row and returns its learning rate."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("edge0_train.build.input_identity", lambda config: {})

    def phase(config: Any, run: Run) -> dict[str, Any]:
        if config.dry_run:
            return {}
        run.log(1, {"loss": 1.0})
        if config.optim.lr > 1:
            raise Edge0Error(f"optim.lr: {config.optim.lr} is too high")
        return {"loss": 10 * config.optim.lr, "steps": 3, "recall": {"heads": config.optim.rows}, "kept": True}

    monkeypatch.setattr("edge0_train.phases.phase_function", lambda name: phase)
    for looks in ("check_inputs", "check_chain_inputs"):  # there is no base
        monkeypatch.setattr(f"edge0_train.inputs.{looks}", lambda config: None)

    def run(*arguments: str) -> tuple[object, str, str]:
        overrides = ("phase=student_sft", f"root={tmp_path / 'root'}", "logger.wandb=disabled", *arguments)
        code = exit_code(monkeypatch, *overrides)
        assert not list((tmp_path / "here").iterdir())
        return code, *capsys.readouterr()

    return run


def runs(root: Path) -> list[str]:
    return sorted(str(file.parent.relative_to(root)) for file in root.rglob("done.json"))


@pytest.mark.parametrize("flag", ["-m", "--multirun", "hydra.mode=MULTIRUN"])
def test_every_combination_has_its_directory_and_its_row(sweep, tmp_path, flag):
    code, told, said = sweep(flag, "optim.lr=1e-3,2e-3", "optim.rows=4,8", "optim.steps=3")
    assert code == 0, said
    names = [f"student_sft-optim.lr-{lr}-optim.rows-{rows}" for lr in ("0.001", "0.002") for rows in (4, 8)]
    assert runs(tmp_path / "root") == names
    table = told.splitlines()[-6:]
    assert table[0].split() == ["job", "loss", "recall.heads"]
    assert [line.split()[-2:] for line in table[2:]] == [["0.01", "4"], ["0.01", "8"], ["0.02", "4"], ["0.02", "8"]]
    assert table[2].startswith("optim.lr=0.001 optim.rows=4 ")
    saved = yaml.safe_load((tmp_path / "root" / names[2] / "config.yaml").read_text())
    assert (saved["optim"]["lr"], saved["optim"]["rows"], saved["optim"]["steps"]) == (2e-3, 4, 3)


def test_a_sweep_that_stopped_goes_on_and_passes_over_what_is_done(sweep, tmp_path):
    code, _, said = sweep("-m", "optim.lr=1e-3,5,1e-2")
    assert code == 2 and said.startswith("error: optim.lr: 5.0 is too high")
    first = tmp_path / "root/student_sft-optim.lr-0.001/done.json"
    before = first.read_bytes()
    code, told, _ = sweep("-m", "optim.lr=1e-3,1e-2", "resume=true")
    assert code == 0 and first.read_bytes() == before and "done already" in told
    assert [line.split() for line in told.splitlines()[-2:]] == [["optim.lr=0.001", "0.01"], ["optim.lr=0.01", "0.1"]]


def test_a_wrong_value_is_said_before_the_first_job(sweep, tmp_path):
    code, _, said = sweep("-m", "optim.lr=1e-3,-1")
    assert code == 2 and said.startswith("error: optim.lr: -1.0 must be larger than 0")
    assert not (tmp_path / "root").exists()


def test_directories_that_differ_by_themselves_keep_their_names(sweep, tmp_path):
    assert sweep("-m", "phase=head_distill,student_sft")[0] == 0
    assert runs(tmp_path / "root") == ["head_distill", "student_sft"]


def test_a_chain_is_swept_as_a_whole(sweep, tmp_path):
    code, told, _ = sweep("phase=all", "-m", "chain=[head_distill,student_sft]", "optim.lr=1e-3,2e-3")
    assert code == 0 and "job" in told
    found = runs(tmp_path)
    assert found == [
        f"root-optim.lr-{lr}/{name}" for lr in ("0.001", "0.002") for name in ("head_distill", "student_sft")
    ]


def test_the_users_own_tiers_are_found(sweep, tmp_path):
    data = yaml.safe_load((config_directory() / "tier/nano.yaml").read_text(encoding="utf-8")) | {"name": "own"}
    (tmp_path / "mine/tier").mkdir(parents=True)
    (tmp_path / "mine/tier/own.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    code, _, said = sweep("--config-dir", str(tmp_path / "mine"), "-m", "tier=own,nano")
    assert code == 0, said
    assert runs(tmp_path / "root") == ["student_sft-tier-nano", "student_sft-tier-own"]
    saved = json.loads((tmp_path / "root/student_sft-tier-own/done.json").read_text())
    assert saved["phase"] == "student_sft"


def test_a_flag_that_a_sweep_does_not_know_is_named(sweep):
    code, _, said = sweep("-m", "optim.lr=1e-3,2e-3", "--cfg", "job")
    assert code == 2 and said == "error: --multirun: cannot be combined with --cfg; leave one of them away\n"


def test_the_table_leaves_out_what_is_the_same():
    text = compared({"a": {"loss": 1.0, "steps": 3, "seconds": 1}, "b": {"loss": 2.0, "steps": 3, "seconds": 2}})
    assert text.splitlines()[0].split() == ["job", "loss"]
