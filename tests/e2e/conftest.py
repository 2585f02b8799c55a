"""One small training on the embedded nano tier, through the command line, shared by all end-to-end tests."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Cli = Callable[..., "subprocess.CompletedProcess[str]"]
ChainTo = Callable[[str], Path]

SMALL = (
    "logger.wandb=disabled",
    "sample.prompts=320",
    "sample.eval_prompts=32",
)
STEPS = {"head_distill": 60, "head_refine": 12, "student_sft": 12, "on_policy": 4}
"""Enough for heads to beat the trivial baselines, far too few for quality."""
PHASES = ("quantize", "teacher_text", *STEPS, "evaluate", "export")


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
def chain_to(tmp_path_factory: pytest.TempPathFactory, train: Cli) -> ChainTo:
    """chain_to(phase) -> root of a chain of small phases, finished up to that one; all test processes build on the same."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "chain" / "nano"
    root.mkdir(parents=True, exist_ok=True)

    def finished(last: str) -> Path:
        for phase in PHASES[: PHASES.index(last) + 1]:
            with root.with_name(f"{phase}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not (root / phase / "done.json").exists():
                    train(f"phase={phase}", f"root={root}", *phase_settings(phase))
        return root

    return finished


@pytest.fixture(scope="session")
def chain(chain_to: ChainTo) -> Path:
    """Root of the finished chain."""
    return chain_to(PHASES[-1])


def phase_settings(phase: str) -> tuple[str, ...]:
    """Small settings of a phase."""
    if phase not in STEPS:
        return SMALL
    more = (
        ("optim.rows=16", "optim.micro_rows=8", "on_policy.rounds=2")
        if phase == "on_policy"
        else ("optim.micro_rows=12",)
    )
    return (*SMALL, f"optim.steps={STEPS[phase]}", "logger.checkpoint_every=2", "logger.every=2", *more)
