"""A training that is killed and resumed, stopped, or shared by two processes, is the training that one process does in one go."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from edge0_runtime.contract.artifacts import read_adapter
from tests.e2e.conftest import STEPS, ChainTo, Cli, phase_settings


@pytest.mark.parametrize("phase", [*STEPS])
def test_killed_and_resumed_run_equals_an_uninterrupted_one(
    chain_to: ChainTo, train: Cli, tmp_path: Path, phase: str
) -> None:
    """kill -9 once a checkpoint exists, resume: the adapter's tensors are bit for bit the uninterrupted run's."""
    chain, kind = chain_to(phase), "prerouter" if phase.startswith("head") else "lora"
    where = (f"root={chain}", f"run_dir={tmp_path / phase}", *phase_settings(phase))
    process = subprocess.Popen(
        [sys.executable, "-m", "edge0_train", f"phase={phase}", *where], stdout=subprocess.DEVNULL
    )
    _wait_for(lambda: any((tmp_path / phase / "checkpoints").glob("step-*.safetensors")), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / phase / "done.json").exists(), "the run finished before it could be killed"

    train(f"phase={phase}", "resume=true", *where)
    resumed = read_adapter(tmp_path / phase / f"{kind}_edge0_nano.safetensors", kind)
    straight = read_adapter(chain / phase / f"{kind}_edge0_nano.safetensors", kind)
    assert all(np.array_equal(resumed.tensors[key], straight.tensors[key]) for key in straight.tensors)
    steps = [json.loads(line)["step"] for line in (tmp_path / phase / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))


def test_trainings_stopped_at_random_moments_end_alike() -> None:
    """A few trials of scripts/kill_and_resume.py; a recorded run has many (benchmarks/results/kill_and_resume)."""
    script = Path(__file__).parents[2] / "scripts" / "kill_and_resume.py"
    done = subprocess.run([sys.executable, script, "--trials", "3", "--seed", "7"], capture_output=True, text=True)
    assert done.returncode == 0 and '"equal": 3' in done.stdout, done.stdout + done.stderr[-3000:]


def test_sigterm_checkpoints_and_tells_how_to_continue(chain_to: ChainTo, tmp_path: Path) -> None:
    where = (f"root={chain_to('student_sft')}", f"run_dir={tmp_path / 'run'}", *phase_settings("student_sft"))
    command = [sys.executable, "-m", "edge0_train", "phase=student_sft", *where]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    _wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists(), process)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 143
    assert said.splitlines()[-1].startswith("stopped by SIGTERM: step ") and said.rstrip().endswith(" resume=true")
    assert any((tmp_path / "run" / "checkpoints").glob("step-*.safetensors"))


@pytest.mark.parametrize("phase", ["head_distill", "student_sft", "on_policy"])
def test_two_ranks_equal_one(chain_to: ChainTo, tmp_path: Path, phase: str) -> None:
    """Two gloo processes share micro-batches, rollouts and scores; the adapter is the one process's, up to float error."""
    chain, kind = chain_to(phase), "prerouter" if phase.startswith("head") else "lora"
    where = (f"root={chain}", f"run_dir={tmp_path / 'run'}", *phase_settings(phase))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "edge0_train"]
    done = subprocess.run([*launch, f"phase={phase}", *where], timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(f"{phase}: done in") == 1, "two ranks that know nothing of each other"
    two = read_adapter(tmp_path / "run" / f"{kind}_edge0_nano.safetensors", kind).tensors
    one = read_adapter(chain / phase / f"{kind}_edge0_nano.safetensors", kind).tensors
    apart = {key: value.astype(np.float32) - two[key].astype(np.float32) for key, value in one.items()}
    assert _norm(apart.values()) <= 1e-4 * _norm(one.values())
    # Adam divides a gradient by its own size: rounding shows most where gradients are smallest (in_proj_a of the last layer).
    for key, difference in apart.items():
        assert np.abs(difference).max() <= 1e-2 * np.abs(one[key]).max(), key


def _norm(arrays: Iterable[np.ndarray]) -> float:
    """Of all values together."""
    return float(np.sqrt(sum(np.square(array, dtype=np.float64).sum() for array in arrays)))


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen, seconds: float = 120.0) -> None:
    """Poll the file system for what a child process is about to write."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing appeared in time"
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.05)
            raise AssertionError("the process ended before it wrote what the test waits for")
