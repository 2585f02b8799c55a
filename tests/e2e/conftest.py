"""One small training on the embedded nano tier, through the command line, shared by all end-to-end tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Cli = Callable[..., "subprocess.CompletedProcess[str]"]

SMALL = (
    "logger.wandb=disabled",
    "sample.prompts=320",
    "sample.eval_prompts=32",
)
STEPS = {"head_distill": 60, "head_refine": 12, "student_sft": 12, "on_policy": 4}
"""Enough for heads to beat the trivial baselines, far too few for quality."""


@pytest.fixture(scope="session")
def train() -> Cli:
    """Call `python -m edge0_train ...` and return the finished process."""

    def run(*overrides: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "edge0_train", *overrides]
        done = subprocess.run(command, text=True, capture_output=True, timeout=300, env={**os.environ})
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    return run


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory, train: Cli) -> Path:
    """Root of a finished chain of small phases."""
    root = tmp_path_factory.mktemp("chain") / "nano"
    train("phase=quantize", f"root={root}", *SMALL)
    train("phase=teacher_text", f"root={root}", *SMALL)
    for phase, steps in STEPS.items():
        train(f"phase={phase}", f"root={root}", *phase_settings(phase, steps))
    train("phase=evaluate", f"root={root}", *SMALL)
    train("phase=export", f"root={root}", *SMALL)
    return root


def phase_settings(phase: str, steps: int) -> tuple[str, ...]:
    """Small settings of one training phase."""
    more = (
        ("optim.rows=16", "optim.micro_rows=8", "on_policy.rounds=2")
        if phase == "on_policy"
        else ("optim.micro_rows=12",)
    )
    return (*SMALL, f"optim.steps={steps}", "logger.checkpoint_every=2", "logger.every=2", *more)
