"""Two ranks: they end with what one ends with, and they stop together."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.checkpoint import checkpoints
from edge0_train.config import Config, config_directory, read_config
from edge0_train.loop import train
from edge0_train.run import join_ranks, open_run
from edge0_train.stopping import Interrupted
from tests.train.toy_loop import OPTIM, Toy, metrics, run_in

WORKER = Path(__file__)
MICRO_ROWS = {"shared": 3, "one micro-batch": 8, "signal": 3, "patience": 3, "silent": 8}
"""Three micro-batches over two ranks; a single one, of which the second rank gets none; a signal to one of the ranks;
evaluations that the ranks do not agree about; and a trainable that neither rank's loss reaches."""
TIMEOUT = 90


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[dict[str, Any]]], str]:
    """Two gloo processes run all cases of MICRO_ROWS in turn: (directory, {case: what each rank ends with}, errors)."""
    directory = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(2):
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(WORKER.parents[2]), "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        log = (directory / f"rank-{rank}.log").open("w")
        processes.append(subprocess.Popen([sys.executable, str(WORKER), str(directory)], env=environment, stderr=log))
    end = time.monotonic() + TIMEOUT
    errors = ""
    try:
        for process in processes:
            process.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        errors = f"the ranks wait for each other: no end after {TIMEOUT} s\n"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    errors += "\n".join((directory / f"rank-{rank}.log").read_text()[-1500:] for rank in range(2))
    results = {
        case: [json.loads(p.read_text()) for p in sorted((directory / case).glob("result-*.json"))]
        for case in MICRO_ROWS
    }
    return directory, results, errors


def a_config(root: Path) -> Config:
    with initialize_config_dir(str(config_directory()), version_base=None):
        return read_config(compose("train", [f"root={root}"]))


def worker(directory: Path) -> None:
    """One rank."""
    rank = join_ranks("cpu").process_index
    group: Any = torch.distributed.group.WORLD
    patience = group._get_backend(torch.device("cpu")).options._timeout
    (directory / f"patience-{rank}.txt").write_text(str(patience.total_seconds()))
    config, opened = a_config(directory / "opened"), "yes"
    try:
        open_run(config)
    except Edge0Error as error:
        opened = str(error)
    (directory / f"opened-{rank}.txt").write_text(opened)
    for case, micro_rows in MICRO_ROWS.items():
        (directory / case).mkdir(exist_ok=True)
        signalled = case == "signal" and rank == 0
        toy = Toy(micro_rows, lambda n, at=signalled: os.kill(os.getpid(), signal.SIGTERM) if at and n == 3 else None)
        objective, optim = toy.objective(), OPTIM
        if case == "patience":
            held_out = [3.0, 2.0, 2.5, 2.5, 1.0, 1.0] if rank == 0 else [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
            objective = toy.objective(evaluate=lambda step, h=held_out: {"held_out": h[step - 1]}, watch="held_out")
            optim = replace(OPTIM, patience=2)
        if case == "silent":
            objective = toy.objective(trainable=toy.parameters | {"spare": torch.nn.Parameter(torch.zeros(2))})
        try:
            result: Any = train(run_in(directory / case), optim, objective)
        except (Interrupted, Edge0Error) as stop:
            result = {"stopped": str(stop)}
        text = json.dumps({"values": [v.tolist() for v in toy.values()], "result": result})
        (directory / case / f"result-{rank}.json").write_text(text)


@pytest.mark.parametrize("case", ["shared", "one micro-batch"])
def test_two_ranks_equal_one(tmp_path, two_ranks, case):
    directory, results, errors = two_ranks
    assert len(results[case]) == 2, errors
    one, alone = Toy(MICRO_ROWS[case]), run_in(tmp_path / "alone")
    summary = train(alone, OPTIM, one.objective())
    assert results[case][0]["values"] == results[case][1]["values"]
    for a, b in zip(results[case][0]["values"], one.values(), strict=True):
        torch.testing.assert_close(torch.tensor(a), b, rtol=1e-5, atol=1e-6)
    for name, value in summary.items():
        if name != "tokens_per_second":
            assert results[case][0]["result"][name] == pytest.approx(value, rel=1e-5), name
    for a, b in zip(metrics(run_in(directory / case)), metrics(alone), strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def test_ranks_share_one_run_directory(two_ranks):
    """Rank 0 alone decides whether the directory exists already; for the others it always does."""
    directory, _, errors = two_ranks
    assert [(directory / f"opened-{rank}.txt").read_text() for rank in range(2)] == ["yes", "yes"], errors


def test_a_rank_waits_for_hours_while_another_works_alone(two_ranks):
    """torch's own limit is 30 minutes, on GPUs 10: phase=quantize, evaluate and export of a real model take longer."""
    directory, _, errors = two_ranks
    waits = [float((directory / f"patience-{rank}.txt").read_text()) for rank in range(2)]
    assert min(waits) >= 24 * 3600, errors


def test_patience_ends_both_ranks_at_the_same_step(two_ranks):
    """Rank 0's evaluations decide; rank 1 alone would have gone on. Both end with the values of step 2."""
    directory, results, errors = two_ranks
    assert len(results["patience"]) == 2, errors
    assert results["patience"][0]["values"] == results["patience"][1]["values"]
    for one in results["patience"]:
        assert (one["result"]["steps"], one["result"]["best_step"]) == (4, 2), errors
    assert [p.name for p in (directory / "patience/checkpoints").glob("best-*")] == ["best-00000002.safetensors"]


def test_both_ranks_name_a_trainable_that_neither_reaches(two_ranks):
    """And only that one: the second rank, which has no micro-batch, reaches nothing."""
    _, results, errors = two_ranks
    assert len(results["silent"]) == 2, errors
    for one in results["silent"]:
        assert "1 tensors have no gradient after step 1: spare" in one["result"]["stopped"], errors


def test_a_signal_to_one_rank_stops_both(two_ranks):
    """Whichever rank hears of it: both leave after the same step, with one checkpoint."""
    directory, results, errors = two_ranks
    assert len(results["signal"]) == 2, errors
    assert results["signal"][0] == results["signal"][1] and "stopped" in results["signal"][0]["result"]
    assert len(checkpoints(directory / "signal" / "checkpoints")) == 1


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
