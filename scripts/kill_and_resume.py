"""Kill trainings at random moments, continue them, and compare what they end with: bit for bit that of one nobody touched.

    python scripts/kill_and_resume.py --trials 100 --out benchmarks/results/kill_and_resume

A trial is `phase=all tier=nano` at a very small size. Its process is stopped once or twice, by SIGKILL or SIGTERM: after a random
part of the time that the undisturbed training took, or just before or after a random one of the renames by which files and
directories appear. Each time the same command with resume=true goes on. Compared are adapters,
base, model directory and traces (tensors and metadata), text rows, cards, metric rows, newest checkpoints and summaries,
without what a clock or the machine says. Of a stopped process the exit code is checked too.

Sessions are forks of this process, which has imported torch but not used it: a process in its own right, without the seconds of
imports. The check that heads beat trivial baselines is left out: it judges a training, and this one has two steps.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from edge0_train.checkpoint import checkpoints
from edge0_train.cli import main as edge0_train
from edge0_train.config import PHASES
from edge0_train.environment import environment
from edge0_train.measure import head_report
from edge0_train.phases import phase_function

SMALL = (
    "phase=all", "tier=nano", "threads=1", "logger.wandb=disabled", "logger.every=1", "logger.checkpoint_every=1",
    "sample.prompts=12", "sample.eval_prompts=4", "sample.batch=4", "sample.max_new_tokens=6", "sample.max_truncated=1",
    "sample.max_repetitive=1", "sample.max_growth=99", "optim.steps=2", "optim.rows=4", "optim.micro_rows=2",
    "on_policy.rounds=2", "export.trace_prompts=1", "export.trace_tokens=4",
)  # fmt: skip
STOPPED = {signal.SIGKILL: (-signal.SIGKILL,), signal.SIGTERM: (143,)}
"""Exit codes that a signal may lead to; 0 where the training ended before it."""
VOLATILE = {"seconds", "peak_rss_mib", "tokens_per_second", "time", "created", "commit", "parents"}
IGNORED = {"config.yaml", "environment.json", "lock"}
"""They name the directory and the machine."""


@dataclass
class Trap:
    """Sends the own process a signal at the nth rename (0: never), and counts renames in a file."""

    count: Path
    at: int = 0
    before: bool = False
    number: int = signal.SIGKILL
    seen: int = 0

    def set(self) -> None:
        """Put itself in the place of the two functions of `os`."""
        for name in ("rename", "replace"):
            setattr(os, name, functools.partial(self.rename, getattr(os, name)))

    def rename(self, real: Callable[..., None], *paths: Any, **options: Any) -> None:
        """The real one, and the signal."""
        self.seen += 1
        if self.seen == self.at and self.before:
            os.kill(os.getpid(), self.number)
        real(*paths, **options)
        if self.seen == self.at and not self.before:
            os.kill(os.getpid(), self.number)
        self.count.write_text(str(self.seen))


def start(root: Path, *more: str, trap: Trap) -> int:
    """The pid of a fork that trains; its output goes to `log` beside the root."""
    pid = os.fork()
    if pid:
        return pid
    trap.set()
    log = os.open(root.with_name("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = ["edge0_train", f"root={root}", *SMALL, *more]
    code = 70
    try:
        edge0_train()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        os._exit(code)


def wait(pid: int) -> int:
    """A fork's exit code; -n for one that signal n has killed."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def stop(pid: int, number: int, seconds: float) -> int:
    """Send the signal after `seconds`, unless it has ended; its exit code."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, number)
    return wait(pid)


def results(root: Path) -> dict[str, Any]:
    """{file below root: what a resumed training must end with too}."""
    newest = {found[-1] for found in map(checkpoints, root.glob("*/checkpoints")) if found}
    return {
        str(path.relative_to(root)): _content(path, str(root))
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name not in IGNORED and (path.parent.name != "checkpoints" or path in newest)
    }


def _content(path: Path, root: str) -> Any:
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            bits = {name: (str(t.dtype), tuple(t.shape), _bytes(t)) for name, t in tensors.items()}
            return bits, _steady({key: _parsed(value) for key, value in (file.metadata() or {}).items()})
    if path.suffix not in (".json", ".jsonl"):
        return path.read_bytes()
    text = path.read_text(encoding="utf-8").replace(root, "")
    return [_steady(json.loads(line)) for line in text.splitlines()] if path.suffix == ".jsonl" else _parsed(text)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _parsed(text: str) -> Any:
    try:
        return _steady(json.loads(text))
    except ValueError:
        return text


def _steady(data: Any) -> Any:
    """Without what differs from run to run. Hashes of adapters stay out too: their files carry the time."""
    if isinstance(data, dict):
        return {key: _steady(value) for key, value in data.items() if key not in VOLATILE and "sha256" not in key}
    if isinstance(data, list):
        return [_steady(value) for value in data]
    return data


def trial(
    number: int, seed: int, directory: Path, seconds: float, renames: int, want: dict[str, Any]
) -> dict[str, Any]:
    """One training, stopped once or twice and continued: what happened, and `differs`, the files that are not as wanted."""
    dice = random.Random(f"{seed}/{number}")
    root = directory / f"trial-{number}" / "root"
    root.parent.mkdir()
    count = root.with_name("renames")
    row: dict[str, Any] = {"trial": number, "stops": [], "differs": []}
    more: tuple[str, ...] = ()
    for _ in range(dice.choice((1, 1, 2))):
        how, trap = dice.choice((signal.SIGKILL, signal.SIGTERM)), Trap(count)
        if dice.random() < 0.5:
            when: dict[str, Any] = {"after_s": round(dice.uniform(0, seconds), 2)}
            code = stop(start(root, *more, trap=trap), how, when["after_s"])
        else:
            trap.at, trap.before, trap.number = dice.randint(1, renames), dice.random() < 0.5, how
            when = {"rename": trap.at, "before": trap.before}
            code = wait(start(root, *more, trap=trap))
        done = sum((root / name / "done.json").exists() for name in PHASES)
        row["stops"].append({"signal": how.name, **when, "code": code, "phases_done": done})
        if code not in (0, *STOPPED[how]):
            row["differs"].append(f"exit code {code} after {how.name}")
        more = ("resume=true",)
    code = wait(start(root, "resume=true", trap=Trap(count)))
    if code:
        row["differs"].append(f"exit code {code} of the last session")
    else:
        row["differs"] += differences(want, results(root))
    if row["differs"]:
        row["log"] = root.with_name("log").read_text(encoding="utf-8")[-2000:]
    else:
        shutil.rmtree(root.parent)
    return row


def differences(want: dict[str, Any], got: dict[str, Any]) -> list[str]:
    """The files that one of them lacks, or that are not equal."""
    return sorted(name for name in want.keys() | got.keys() if want.get(name) != got.get(name))


def run(trials: int, seed: int, directory: Path) -> Iterator[dict[str, Any]]:
    """An undisturbed training, then the trials' rows. Raises RuntimeError when it fails, or a second one differs from it."""
    head_report.check_beats_baselines = lambda *_: None
    for name in PHASES:
        phase_function(name)  # imported before the fork
    ends = []
    for name in ("straight", "again"):
        root = directory / name / "root"
        root.parent.mkdir(parents=True)
        began = time.monotonic()
        if wait(start(root, trap=Trap(root.with_name("renames")))):
            raise RuntimeError(f"the undisturbed training failed: {root.with_name('log').read_text()[-2000:]}")
        seconds = time.monotonic() - began
        ends.append(results(root))
    if found := differences(*ends):
        raise RuntimeError(f"two undisturbed trainings differ: {', '.join(found)}")
    renames = int(root.with_name("renames").read_text())
    print(
        f"{renames} renames, {len(ends[0])} files are compared; an undisturbed training takes {seconds:.1f} s",
        flush=True,
    )
    for number in range(trials):
        yield trial(number, seed, directory, seconds, renames, ends[0])


def main() -> int:
    """Exit code 1 when a trial ended otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write rows.jsonl and summary.json into this directory")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as directory,
        contextlib.suppress(KeyboardInterrupt),
    ):  # then those that there are
        for row in run(arguments.trials, arguments.seed, Path(directory)):
            rows.append(row)
            print(json.dumps(row), flush=True)
    stops = [one for row in rows for one in row["stops"]]
    equal = sum(not row["differs"] for row in rows)
    made_with = environment()
    summary = {
        **{name: made_with[name] for name in ("commit", "machine", "python")},
        "load": [round(load, 1) for load in os.getloadavg()],
        "command": f"python scripts/kill_and_resume.py --trials {arguments.trials} --seed {arguments.seed}",
        "trials": len(rows),
        "equal": equal,
        "stops": Counter(f"{one['signal']}, exit code {one['code']}" for one in stops),
        "in_phase": Counter(list((*PHASES, "over"))[one["phases_done"]] for one in stops),
    }
    print(json.dumps(summary, indent=2))
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        (arguments.out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return int(equal < len(rows))


if __name__ == "__main__":
    sys.exit(main())
