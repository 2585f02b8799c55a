"""The run directory: everything needed to know and to repeat what a run did, and the place where it continues.

config.yaml        resolved configuration
environment.json   command line, package versions, git commit and diff, machine
inputs.json        base fingerprint, hashes of tokenizer and chat template, teacher
lock               held by the process that runs here, and says which; released by the system when that process ends
wandb.json, wandb/ the id of the run in W&B, and its files
metrics.jsonl      one JSON object a row; `step` is the optimizer step
samples.jsonl      a few rows as text: what the teacher, or the trained student, writes
checkpoints/       trainables and optimizer state (safetensors, no pickle)
done.json          written last: the phase's summary; a run with it is finished

As long as there is nothing but the first five, nothing has happened in it: it vanishes when its process ends, however that
ends, and never blocks a command. JSON is strict: a number that is not finite is null.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from edge0_runtime.contract.edge import explained
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import atomic_replace, read_json, read_text, read_yaml, strict_json
from edge0_train.config import Config, all_settings, to_dict
from edge0_train.environment import environment, peak_rss_mib
from edge0_train.locking import acquire, release

T = TypeVar("T")
VOLATILE = frozenset(name for name, setting in all_settings().items() if setting.volatile)
"""Settings that may differ between a run and its continuation."""


DESCRIPTION = frozenset({"config.yaml", "environment.json", "inputs.json", "lock", "wandb.json", "wandb"})
"""What a run directory holds before anything has happened in it."""
TEMPORARY = re.compile(r"\..+\.\d+-[0-9a-f]{8}\.tmp")
"""What `atomic_replace` leaves half-written when its process is killed."""
CONTINUE = "and continue with resume=true"
RESTORE_CONFIG = "restore it, or choose another run_dir: without its settings a run cannot continue"
MEND_METRICS = f"delete that line, {CONTINUE}"
DELETE_INPUTS = f"delete it, {CONTINUE}: it is written anew"
DELETE_DONE = f"delete it, {CONTINUE}: what was finished is kept, and the end is done again"
MAX_METRICS = 2**30
LONGEST_WAIT = datetime.timedelta(days=7)


@dataclass
class Run:
    """An open run directory; as a context manager it is closed at the end of the block, however that ends."""

    directory: Path
    config: Config
    lock: int | None = None
    started: float = field(default_factory=time.time)
    wandb: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    @property
    def checkpoints(self) -> Path:
        """Where the loop keeps resumable states and the best values; it need not exist."""
        return self.directory / "checkpoints"

    @property
    def is_done(self) -> bool:
        """Whether the run has its done.json."""
        return read_summary(self.directory) is not None

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Append one row to metrics.jsonl (and W&B, whose step is our own metric so that a resume may go back).

        Raises Edge0Error when it cannot be written: a full disk must not cost more than the steps since the last checkpoint.
        """
        path = self.directory / "metrics.jsonl"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(_json({"step": step, **metrics}) + "\n")
                file.flush()
                if path.is_file():
                    os.fsync(file.fileno())  # no later on the disk than the checkpoint that counts on it
        except OSError as error:
            raise Edge0Error(
                f"{path}: cannot be written ({error.strerror}); free space in {path.parent} {CONTINUE}"
            ) from error
        if self.wandb:
            self.wandb.log({"step": step, **metrics})

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl so far, without a last one that a kill has cut short.

        Raises Edge0Error naming the first other line that is no row.
        """
        path = self.directory / "metrics.jsonl"
        if not path.exists():
            return []
        rows = []
        for number, line in enumerate(read_text(path, MAX_METRICS).split("\n")[:-1], 1):
            try:
                row = strict_json(line)
                if not isinstance(row, dict) or type(row.get("step")) is not int:
                    raise ValueError("has no step")
            except ValueError as error:
                raise Edge0Error(f"{path}, line {number}: not a metric row ({error}); {MEND_METRICS}") from error
            rows.append(row)
        return rows

    def record_inputs(self, identity: dict[str, Any]) -> None:
        """Write inputs.json: what the run is made from. Raises Edge0Error when a resumed run finds something else."""
        path = self.directory / "inputs.json"
        if path.exists():
            before, now = _flat(read_json(path, DELETE_INPUTS)), _flat(identity)
            changed = [
                f"{key}: was {before[key]}, is {now[key]}" for key in now if key in before and now[key] != before[key]
            ]
            if changed:
                raise Edge0Error(
                    f"resume: {self.directory} was started from other inputs ({'; '.join(changed)});"
                    " put them back, or use another run_dir"
                )
        elif PartialState().is_main_process:
            write_json(path, identity)

    def write_samples(self, samples: Sequence[dict[str, str]]) -> None:
        """Write samples.jsonl (and a W&B table): rows of text with the same keys."""
        write_jsonl(self.directory / "samples.jsonl", samples)
        if self.wandb and samples:
            import wandb

            columns = list(samples[0])
            self.wandb.log(
                {"samples": wandb.Table(columns, [[sample[name] for name in columns] for sample in samples])}
            )

    def forget_after(self, step: int) -> dict[str, Any]:
        """Drop metric rows of steps that a resumed run will do again; returns the last row that stays, without its step."""
        path = self.directory / "metrics.jsonl"
        if not path.exists():
            return {}
        kept = [row for row in self.metrics() if row["step"] <= step]
        write_text(path, "".join(_json(row) + "\n" for row in kept))
        return {k: v for k, v in kept[-1].items() if k != "step"} if kept else {}

    def finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Mark the run as finished; returns the summary with this session's wall time and peak memory added."""
        summary = {
            "phase": self.config.phase,
            "seconds": round(time.time() - self.started, 1),
            "peak_rss_mib": peak_rss_mib(),
            **summary,
        }
        if PartialState().is_main_process:
            write_json(self.directory / "done.json", summary)
        return summary

    def close(self, failed: bool = False) -> None:
        """End the W&B run; remove a directory in which nothing has happened, and nothing else; let go of its lock.

        Nothing of it is done twice, and on ranks other than the first there is nothing to do.
        """
        try:
            if self.wandb:
                self.wandb.finish(exit_code=int(failed))
                self.wandb = None
        finally:
            if self.lock is not None:
                if is_unused(self.directory):
                    shutil.rmtree(self.directory, ignore_errors=True)
                release(self.lock)
                self.lock = None


def join_ranks(device: str) -> PartialState:
    """This process among the ranks of its training, which wait for each other as long as that may take."""
    # cpu: else accelerate takes ranks on CPUs for single processes. timeout: torch ends ranks that have waited 10 minutes on
    # GPUs, half an hour on CPUs; while rank 0 alone quantises, evaluates or hashes a teacher, it is hours.
    return PartialState(cpu=device == "cpu", timeout=LONGEST_WAIT)


def open_run(config: Config) -> Run:
    """Create the run directory, or take up an existing one when `resume=true`; rank 0 alone decides, and holds its lock.

    Raises Edge0Error (on every rank) when the directory exists without resume, belongs to another configuration, or another
    process is at work in it.
    """
    lock = by_rank_0(lambda: _open_directory(config))
    return Run(Path(config.run_dir), config, lock if PartialState().is_main_process else None)


def by_rank_0(do: Callable[[], T]) -> T:
    """What `do` returns on rank 0, which alone calls it; its Edge0Error (or OSError, as one) is raised on every rank."""
    told: list[Any] = [None, ""]
    if PartialState().is_main_process:
        try:
            told = [do(), ""]
        except (Edge0Error, OSError) as error:
            told = [None, explained(error) or str(error)]
    broadcast_object_list(told)
    if told[1]:
        raise Edge0Error(told[1])
    result: T = told[0]
    return result


def _open_directory(config: Config) -> int:
    """The lock of the directory: a new one, one in which nothing has happened yet, or the resumed run's."""
    directory = Path(config.run_dir)
    saved, lock, machine = (directory / name for name in ("config.yaml", "lock", "environment.json"))
    ours = (saved.exists() and machine.exists()) or (lock.exists() and is_unused(directory))
    if directory.exists() and not ours and (not directory.is_dir() or any(directory.iterdir())):
        raise Edge0Error(f"run_dir: {directory} is not empty and is no run directory; choose another run_dir")
    directory.mkdir(parents=True, exist_ok=True)
    run = Run(directory, config, acquire(lock, f"run_dir: {directory}"))
    with contextlib.ExitStack() as opening:
        opening.push(run)  # closed when opening it fails
        if is_unused(directory):
            for path in directory.iterdir():  # of a process that was killed before anything happened
                if path != lock:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            write_json(machine, environment())
            write_text(saved, yaml.safe_dump(to_dict(config), sort_keys=False))
        elif config.resume:
            _same_config(read_yaml(saved, RESTORE_CONFIG), to_dict(config), directory)
            remove_temporary(directory)
        else:
            raise Edge0Error(
                f"run_dir: {directory} exists already; choose another run_dir or continue it with resume=true"
            )
        opening.pop_all()
    assert run.lock is not None
    return run.lock


def is_unused(directory: Path) -> bool:
    """Whether nothing has happened in a run directory: there is no file but those that describe the run."""
    files = (path.relative_to(directory) for path in directory.rglob("*") if not path.is_dir() or path.is_symlink())
    return all(file.parts[0] in DESCRIPTION or TEMPORARY.fullmatch(file.name) for file in files)


def remove_temporary(directory: Path) -> None:
    """Remove what a killed process has left half-written below a directory that is this process's alone."""
    for path in directory.rglob(".*.tmp"):
        if TEMPORARY.fullmatch(path.name):
            path.unlink()


def my_share(items: Sequence[T]) -> Sequence[T]:
    """This rank's share of independent pieces of work: every n-th one."""
    state = PartialState()
    return items[state.process_index :: state.num_processes]


def read_summary(directory: Path) -> dict[str, Any] | None:
    """What a finished run's done.json says (`Run.finish`); None while it is not. Raises Edge0Error for a damaged one."""
    file = directory / "done.json"
    return read_json(file, DELETE_DONE) if file.exists() else None


def write_json(path: Path, data: Any) -> None:
    """Atomically, indented by 2, ASCII only."""
    write_text(path, _json(data, indent=2) + "\n")


def write_jsonl(path: Path, rows: Iterable[Any]) -> None:
    """A line for each row."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write_text(path: Path, text: str) -> None:
    """Atomically, as UTF-8: a reader sees the old file or the whole new one."""
    with atomic_replace(path) as temporary:
        Path(temporary).write_text(text, encoding="utf-8")


def _json(data: Any, indent: int | None = None) -> str:
    return json.dumps(_finite(data), indent=indent, allow_nan=False)


def _finite(data: Any) -> Any:
    """The same data with None in the place of numbers that JSON does not know."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _same_config(saved: dict[str, Any], now: dict[str, Any], directory: Path) -> None:
    before, after = _flat(saved), _flat(now)
    differing = [
        f"{key}: saved {before.get(key)!r}, now {after.get(key)!r}"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key) and key not in VOLATILE
    ]
    if differing:
        raise Edge0Error(
            f"resume: {directory} was started with another configuration ({'; '.join(differing[:5])});"
            " use the same settings or another run_dir"
        )


def _flat(data: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(data, dict):
        return {prefix: list(data) if isinstance(data, tuple) else data}
    return {k: v for key, value in data.items() for k, v in _flat(value, f"{prefix}.{key}".lstrip(".")).items()}
