"""W&B: one run for a training, told in the mode that was asked for; without it nothing is lost."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.config import Config, configure
from edge0_train.run import open_run
from edge0_train.tracking import check_wandb, start_wandb


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return configure(f"root={tmp_path}/root", "phase=student_sft")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `wandb.init` was called with, each time."""
    calls: list[dict[str, Any]] = []
    made = SimpleNamespace(define_metric=lambda *_, **__: None, log=lambda row: None, finish=lambda **_: None)
    fake = SimpleNamespace(init=lambda **arguments: calls.append(arguments) or made, Settings=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return calls


def test_without_wandb_everything_is_in_metrics_jsonl(config, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)  # what an absent package looks like to `import`
    run = open_run(config)
    start_wandb(run)
    run.log(1, {"loss": 1.0})
    assert run.wandb is None and run.metrics() == [{"step": 1, "loss": 1.0}]
    assert "wandb is not installed" in capsys.readouterr().err


def test_wandb_counts_by_our_own_step(config, monkeypatch):
    """W&B refuses steps that go back, as a resume may: the step is a metric like others, and offline is the default."""
    asked: dict[str, Any] = {}
    defined: list[tuple[Any, ...]] = []
    logged: list[dict[str, Any]] = []

    def log(row: dict[str, Any], **arguments: Any) -> None:
        assert not arguments
        logged.append(row)

    made = SimpleNamespace(define_metric=lambda name, step_metric: defined.append((name, step_metric)), log=log)
    fake = SimpleNamespace(init=lambda **arguments: asked.update(arguments) or made, Settings=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = open_run(config)
    start_wandb(run)
    for step in (1, 2, 1):
        run.log(step, {"loss": 0.5})
    assert (
        asked["mode"] == "offline" and asked["dir"] == str(run.directory) and asked["config"]["phase"] == "student_sft"
    )
    assert defined == [("*", "step")] and [row["step"] for row in logged] == [1, 2, 1]
    quiet = dataclasses.replace(config, logger=dataclasses.replace(config.logger, wandb="disabled"))
    asked.clear()
    start_wandb(dataclasses.replace(run, config=quiet, wandb=None))
    assert not asked


def test_a_resumed_training_is_the_same_wandb_run(config, asked):
    for session in (config, dataclasses.replace(config, resume=True)):
        with open_run(session) as run:
            start_wandb(run)
            run.log(1, {"loss": 1.0})
    first, second = asked
    assert first["id"] == second["id"] == json.loads((run.directory / "wandb.json").read_text())["id"]
    assert first["resume"] == second["resume"] == "allow"


def test_another_training_is_another_wandb_run(config, asked, tmp_path):
    for name in ("a", "b"):
        start_wandb(open_run(dataclasses.replace(config, run_dir=str(tmp_path / name))))
    assert asked[0]["id"] != asked[1]["id"]


def test_a_damaged_id_is_named_and_deleting_it_helps(config, asked):
    with open_run(config) as run:
        run.log(1, {"loss": 1.0})
        for content in ("", "{}", '{"id": 3}'):
            (run.directory / "wandb.json").write_text(content)
            with pytest.raises(Edge0Error, match=r"wandb\.json: .*delete it"):
                start_wandb(run)
        (run.directory / "wandb.json").unlink()
        start_wandb(run)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("setting", "variable", "mode"),
    [
        ("offline", "online", "online"),
        ("offline", "dryrun", "offline"),
        ("online", "offline", "offline"),
        ("online", "run", "online"),
        ("offline", "disabled", None),
        ("disabled", "online", None),
    ],
)
def test_wandbs_own_variable_is_heard(config, asked, monkeypatch, setting, variable, mode):
    monkeypatch.setenv("WANDB_MODE", variable)
    config = dataclasses.replace(config, logger=dataclasses.replace(config.logger, wandb=setting))
    start_wandb(open_run(config))
    assert [call["mode"] for call in asked] == [mode] * bool(mode)


def test_an_unknown_mode_is_named(config, asked, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "of")
    with pytest.raises(Edge0Error, match="WANDB_MODE: 'of' is unknown; set it to one of online"):
        start_wandb(open_run(config))


def test_a_missing_key_is_said_before_the_first_phase(tmp_path, monkeypatch):
    """By the real package, which finds no key; phases that tell it nothing need none."""
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    wandb.teardown()
    phases = [configure(f"phase={name}", "logger.wandb=online") for name in ("quantize", "student_sft")]
    check_wandb(phases[:1])
    with pytest.raises(Edge0Error, match=r"logger\.wandb: .*`wandb login`.*logger\.wandb=offline") as error:
        check_wandb(phases)
    assert "\n" not in str(error.value)
    check_wandb([dataclasses.replace(phases[1], logger=dataclasses.replace(phases[1].logger, wandb="offline"))])
