"""The optimizer loop: exact resume, equal windows however they are cut, loud failures, two ranks."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file, save_file

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.checkpoint import KEEP, checkpoints, load_checkpoint, save_checkpoint
from edge0_train.config import Config, Logger, Optim, config_directory, read_config
from edge0_train.loop import Backward, Interrupted, Objective, learning_rate, train
from edge0_train.run import Run, open_run

OPTIM = Optim(
    steps=6, rows=8, micro_rows=3, lr=1e-2, weight_decay=0.01, warmup=2, schedule="cosine", clip=1.0, patience=0
)
ROWS = 8
LENGTHS = [3, 1, 7, 2, 5, 1, 4, 6]
"""Valid tokens of the window's rows: unequal on purpose."""


@dataclass(frozen=True)
class Micro:
    """Flat tokens of some rows."""

    x_ND: torch.Tensor
    y_N: torch.Tensor

    @property
    def valid(self) -> int:
        return len(self.y_N)

    @property
    def tokens(self) -> int:
        return 2 * len(self.y_N)


def data(step: int) -> list[Micro]:
    """The step's rows, one Micro each: a function of the step alone."""
    random = torch.Generator().manual_seed(1000 + step)
    return [Micro(torch.randn(n, 4, generator=random), torch.randn(n, generator=random)) for n in LENGTHS]


def cut(rows: list[Micro], size: int) -> list[Micro]:
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [Micro(torch.cat([r.x_ND for r in part]), torch.cat([r.y_N for r in part])) for part in parts]


class Toy:
    """Two-layer regression. `calls` counts loss calls; `on_call` runs inside each of them."""

    def __init__(self, micro_rows: int = 3, on_call: Callable[[int], None] = lambda n: None):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        self.micro_rows, self.on_call, self.calls = micro_rows, on_call, 0

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.model.named_parameters())

    def loss(self, micro: Micro, backward: Backward) -> dict[str, float]:
        self.calls += 1
        self.on_call(self.calls)
        error_N = self.model(micro.x_ND)[:, 0] - micro.y_N
        backward((error_N**2).sum())
        return {"absolute": float(error_N.detach().abs().sum())}

    def objective(self, **changes: Any) -> Objective:
        objective = Objective(self.parameters, lambda step: cut(data(step), self.micro_rows), self.loss)
        return replace(objective, **changes)

    def values(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.parameters.values()]


def run_in(directory: Path, *, resume: bool = False, every: int = 1, checkpoint_every: int = 100) -> Run:
    """A run directory as the loop knows it."""
    directory.mkdir(exist_ok=True)
    logger = Logger(wandb="disabled", project="test", every=every, checkpoint_every=checkpoint_every)
    return Run(directory, SimpleNamespace(resume=resume, phase="toy", logger=logger))  # type: ignore[arg-type]


def metrics(run: Run) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl without the one number that depends on the clock."""
    lines = (run.directory / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_second"} for line in lines]


def newest(directory: Path) -> dict[str, torch.Tensor]:
    """Everything in the newest checkpoint: values, moments, step counters."""
    return load_file(str(checkpoints(directory / "checkpoints")[-1]))


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# -- resume ------------------------------------------------------------------------------------------------------------


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


# -- windows -----------------------------------------------------------------------------------------------------------


def plain_training(steps: int) -> tuple[list[torch.Tensor], list[float]]:
    """Plain torch: the mean over all tokens of the window, one backward."""
    toy, losses = Toy(), []
    optimizer = torch.optim.AdamW(toy.model.parameters(), lr=OPTIM.lr, weight_decay=OPTIM.weight_decay)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate(OPTIM, step)
        x, y = (torch.cat([getattr(row, name) for row in data(step)]) for name in ("x_ND", "y_N"))
        loss = ((toy.model(x)[:, 0] - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(toy.model.parameters(), OPTIM.clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    return toy.values(), losses


@pytest.mark.parametrize("micro_rows", [1, 2, 3, 4, 8])
def test_any_cut_of_the_window_is_the_plain_mean_over_all_tokens(tmp_path, micro_rows):
    toy, run = Toy(micro_rows), run_in(tmp_path / "run")
    train(run, OPTIM, toy.objective())
    want, losses = plain_training(OPTIM.steps)
    for a, b in zip(toy.values(), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert [row["loss"] for row in metrics(run)] == pytest.approx(losses, rel=1e-6)
    assert toy.calls == OPTIM.steps * math.ceil(ROWS / micro_rows)


def test_metrics_are_per_valid_token_and_the_summary_counts_tokens(tmp_path):
    toy, run = Toy(), run_in(tmp_path / "run", every=4)
    summary = train(run, OPTIM, toy.objective(evaluate=lambda step: {"held_out": float(step)}))
    rows = metrics(run)
    assert [row["step"] for row in rows] == [4, 6] and [row["held_out"] for row in rows] == [4.0, 6.0]
    assert all(row["valid_tokens"] == sum(LENGTHS) for row in rows)
    start = Toy()
    x, y = (torch.cat([getattr(row, name) for row in data(0)]) for name in ("x_ND", "y_N"))
    first = run_in(tmp_path / "first")
    train(first, replace(OPTIM, steps=1), Toy().objective())
    error = (start.model(x)[:, 0] - y).detach()
    assert metrics(first)[0]["absolute"] == pytest.approx(float(error.abs().mean()), rel=1e-6)
    assert metrics(first)[0]["lr"] == pytest.approx(OPTIM.lr / 2)
    assert summary["tokens"] == OPTIM.steps * 2 * sum(LENGTHS) and summary["steps"] == OPTIM.steps


def test_clip_zero_means_no_clipping(tmp_path):
    norms = []
    for clip in (0.0, 1e9, 1e-3):
        toy, run = Toy(), run_in(tmp_path / str(clip))
        train(run, replace(OPTIM, clip=clip, steps=3), toy.objective())
        norms.append((toy.values(), metrics(run)[-1]["gradient_norm"]))
    assert same(norms[0][0], norms[1][0]) and norms[0][1] == norms[1][1]
    assert norms[2][1] > 1e-3  # the logged norm is the one before clipping


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("warmup", [0, 5, 50])
def test_learning_rate(schedule, warmup):
    optim = replace(OPTIM, steps=50, lr=2.0, warmup=warmup, schedule=schedule)
    rates = [learning_rate(optim, step) for step in range(50)]
    assert rates[:warmup] == pytest.approx([2.0 * (n + 1) / warmup for n in range(warmup)])
    rest = rates[warmup:]
    if schedule == "constant":
        assert rest == [2.0] * len(rest)
    elif rest:
        want = [2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * n / len(rest))) / 2) for n in range(len(rest))]
        assert rest == pytest.approx(want)
        assert rest[0] == 2.0 and rest == sorted(rest, reverse=True) and 0.2 < rest[-1] < 0.21
    assert all(rate > 0 for rate in rates)


def test_rate_is_set_once_a_step_and_is_the_resumed_steps_own(tmp_path):
    run = run_in(tmp_path / "run")
    train(run, OPTIM, Toy().objective())
    assert [row["lr"] for row in metrics(run)] == [learning_rate(OPTIM, step) for step in range(OPTIM.steps)]


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run_before_the_step(tmp_path, bad):
    toy = Toy()

    def loss(micro: Micro, backward: Backward) -> dict[str, float]:
        fifth = toy.calls == 4  # the second micro-batch of step 2
        return toy.loss(micro, lambda value: backward(value * (bad if fifth else 1.0)))

    run = run_in(tmp_path / "run", checkpoint_every=1)
    with pytest.raises(Edge0Error, match=r"step 1: loss .*optim\.lr"):
        train(run, OPTIM, toy.objective(loss=loss))
    assert [p.name for p in checkpoints(run.checkpoints)] == ["step-00000001.safetensors"]
    once = Toy()
    train(run_in(tmp_path / "once"), replace(OPTIM, steps=1), once.objective())
    assert same(toy.values(), once.values())  # nothing was spoilt


def test_a_window_without_valid_token_stops_the_run(tmp_path):
    empty = Micro(torch.zeros(0, 4), torch.zeros(0))
    with pytest.raises(Edge0Error, match="step 0: no token"):
        train(run_in(tmp_path / "run"), OPTIM, Toy().objective(window=lambda step: [empty, empty]))


def test_one_micro_batch_without_valid_token_is_fine(tmp_path):
    """Short replies have no predicted position, so a micro-batch of phase 1 can be empty."""
    empty = Micro(torch.zeros(0, 4), torch.zeros(0))
    with_empty, without = Toy(), Toy()
    train(run_in(tmp_path / "a"), OPTIM, with_empty.objective(window=lambda s: [empty, *cut(data(s), 3), empty]))
    train(run_in(tmp_path / "b"), OPTIM, without.objective())
    assert same(with_empty.values(), without.values())


def test_a_trainable_that_the_loss_does_not_reach_is_named(tmp_path):
    toy = Toy()
    spare = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(Edge0Error, match=r"no gradient .*spare"):
        train(run_in(tmp_path / "run"), OPTIM, toy.objective(trainable=toy.parameters | {"spare": spare}))


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


def test_a_checkpoint_of_other_tensors_is_refused(tmp_path):
    file = checkpoints(trained(tmp_path / "run"))[-1]
    tensors = load_file(str(file))
    cases = {
        "stranger": tensors | {"value:other": torch.zeros(1)},
        "lacking": {k: v for k, v in tensors.items() if k != "value:0.bias"},
        "shape": tensors | {"value:0.bias": torch.zeros(7)},
    }
    for name, content in cases.items():
        save_file(content, str(file), metadata={"step": "6"})
        toy = Toy()
        with pytest.raises(Edge0Error, match=file.name):
            load_checkpoint(file, toy.parameters, torch.optim.AdamW(toy.model.parameters()))
            pytest.fail(name)
    save_file(tensors, str(file))  # without a step
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


# -- ranks -------------------------------------------------------------------------------------------------------------

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
    from accelerate import PartialState

    rank = PartialState(cpu=True).process_index
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
