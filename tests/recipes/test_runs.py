"""What recipes share, and their own trainings: objectives of the package in an order that it lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge0_runtime.contract.artifacts import read_adapter
from edge0_train.config import Config
from edge0_train.run import Run, open_run
from edge0_train.student import StudentPath
from recipes import runs
from recipes.paper_claims.arms import heads_after_lora, native_sft
from tests.train.conftest import Make

SMALL = ("optim.steps=2", "optim.rows=4", "optim.micro_rows=4", "optim.warmup=0", "logger.every=1", "optim.lr=1e-3")
LORA, HEADS = "lora_edge0_nano.safetensors", "prerouter_edge0_nano.safetensors"


def test_a_run_is_done_once_and_continued_when_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Config] = []

    def stopped_then_finished(config: Config) -> None:
        done.append(config)
        Path(config.run_dir).mkdir(exist_ok=True)
        if config.resume:
            (tmp_path / "run" / "done.json").write_text(json.dumps({"seconds": 3.0}))

    monkeypatch.setattr(runs, "run_phase", stopped_then_finished)
    for _ in range(3):
        runs.run_once("student_sft", tmp_path / "run", "seed=7", "optim.steps=5")
    assert [config.resume for config in done] == [False, True]
    first = done[0]
    assert (first.phase, first.tier.name, first.seed, first.optim.steps) == ("student_sft", "nano", 7, 5)
    assert first.run_dir == str(tmp_path / "run") and first.logger.wandb == "disabled"
    assert runs.finished(tmp_path / "run") == {"seconds": 3.0}
    with pytest.raises(FileNotFoundError, match="elsewhere: not finished"):
        runs.finished(tmp_path / "elsewhere")


def test_native_lora_and_the_heads_that_come_after_it(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pass is predicted; the LoRA does not move while its heads train."""
    predicted: list[Any] = []
    monkeypatch.setattr(StudentPath, "predicted", lambda *arguments: predicted.append(arguments))

    def do(function: Any, phase: str, name: str, *overrides: str) -> Path:
        config = make_config(phase, f"run_dir={tmp_path / name}", *SMALL, *overrides)
        run: Run = open_run(config)
        assert run.finish(function(config, run))["steps"] == 2
        return tmp_path / name

    lora = do(native_sft, "student_sft", "native")
    made = read_adapter(lora / LORA, "lora")
    assert any(np.abs(value).max() > 0 for name, value in made.tensors.items() if name.endswith("lora_B"))
    heads = do(heads_after_lora, "head_distill", "last", f"inputs.lora={lora}")
    provenance = read_adapter(heads / HEADS, "prerouter").provenance
    assert provenance and provenance.phases[-1].parents == {"lora": made.sha256}
    assert not predicted and not (heads / LORA).exists()
