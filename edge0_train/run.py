"""The run directory: everything needed to know and to repeat what a run did, and the place where it continues.

config.yaml        resolved configuration
environment.json   command line, package versions, git commit and diff, machine
inputs.json        base fingerprint, hashes of tokenizer and chat template, teacher
metrics.jsonl      one JSON object a row; `step` is the optimizer step
samples.jsonl      a few rows as text: what the teacher, or the trained student, writes
checkpoints/       trainables and optimizer state (safetensors, no pickle)
done.json          written last: the phase's summary; a run with it is finished
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import atomic_replace
from edge0_train.config import Config, all_settings, to_dict

PACKAGES = ("torch", "transformers", "peft", "accelerate", "datasets", "safetensors", "hydra-core", "wandb")
T = TypeVar("T")
VOLATILE = frozenset(name for name, setting in all_settings().items() if setting.volatile)
"""Settings that may differ between a run and its continuation."""


@dataclass
class Run:
    """An open run directory."""

    directory: Path
    config: Config
    is_new: bool = False
    started: float = field(default_factory=time.time)
    wandb: Any = None

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
                file.write(json.dumps({"step": step, **metrics}) + "\n")
        except OSError as error:
            raise Edge0Error(
                f"{path}: cannot be written ({error.strerror}); free space in {path.parent} and continue with resume=true"
            ) from error
        if self.wandb:
            self.wandb.log({"step": step, **metrics})

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl so far."""
        path = self.directory / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []

    def record_inputs(self, identity: dict[str, Any]) -> None:
        """Write inputs.json: what the run is made from. Raises Edge0Error when a resumed run finds something else."""
        path = self.directory / "inputs.json"
        if path.exists():
            before, now = _flat(json.loads(path.read_text(encoding="utf-8"))), _flat(identity)
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
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]  # a kill may cut the last one short
        kept = [line for line in whole if json.loads(line)["step"] <= step]
        write_text(path, "".join(kept))
        return {k: v for k, v in json.loads(kept[-1]).items() if k != "step"} if kept else {}

    def discard_if_unused(self) -> None:
        """Remove a new run directory in which nothing happened yet, so that a corrected command can use its name."""
        if self.wandb:
            self.wandb.finish()
        if self.is_new and {path.name for path in self.directory.iterdir()} <= {
            "config.yaml",
            "environment.json",
            "inputs.json",
            "wandb",
        }:
            shutil.rmtree(self.directory)

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
        if self.wandb:
            self.wandb.finish()
        return summary


def open_run(config: Config) -> Run:
    """Create the run directory, or take up an existing one when `resume=true`; rank 0 alone decides.

    Raises Edge0Error (on every rank) when the directory exists without resume, or belongs to another configuration.
    """
    state = PartialState()
    problem, is_new = [""], [False]
    if state.is_main_process:
        try:
            is_new = [_open_directory(config)]
        except Edge0Error as error:
            problem = [str(error)]
    broadcast_object_list(problem)
    broadcast_object_list(is_new)
    if problem[0]:
        raise Edge0Error(problem[0])
    return Run(Path(config.run_dir), config, is_new=bool(is_new[0]))


def _open_directory(config: Config) -> bool:
    """Whether the directory is new."""
    directory = Path(config.run_dir)
    saved = directory / "config.yaml"
    if saved.exists():
        if not config.resume:
            raise Edge0Error(
                f"run_dir: {directory} exists already; choose another run_dir or continue it with resume=true"
            )
        _same_config(yaml.safe_load(saved.read_text(encoding="utf-8")), to_dict(config), directory)
    elif directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise Edge0Error(f"run_dir: {directory} is not empty and is no run directory; choose another run_dir")
    else:
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / "environment.json", environment())
        write_text(saved, yaml.safe_dump(to_dict(config), sort_keys=False))
        return True
    return False


def start_wandb(run: Run) -> None:
    """Open the W&B run, unless logger.wandb=disabled or the package is absent (metrics.jsonl has everything)."""
    logger = run.config.logger
    if logger.wandb == "disabled" or not PartialState().is_main_process:
        return
    try:
        import wandb
    except ImportError:
        print("wandb is not installed: metrics go to metrics.jsonl only", file=sys.stderr)
        return
    run.wandb = wandb.init(
        project=logger.project,
        name=f"{run.config.tier.name}-{run.config.phase}-{run.config.seed}",
        dir=str(run.directory),
        mode=logger.wandb,  # type: ignore[arg-type]
        config=to_dict(run.config),
        settings=wandb.Settings(silent=True, console="off", disable_git=True),
    )
    run.wandb.define_metric("*", step_metric="step")


def my_share(items: Sequence[T]) -> Sequence[T]:
    """This rank's share of independent pieces of work: every n-th one."""
    state = PartialState()
    return items[state.process_index :: state.num_processes]


def peak_rss_mib() -> int:
    """Largest resident set of this process so far, in MiB (Linux counts KiB, macOS bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / 2**20) if sys.platform == "darwin" else round(peak / 2**10)


def environment() -> dict[str, Any]:
    """Command line, versions, code state and machine."""
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "commit": code_commit(),
        "diff": _git("diff", "HEAD"),
    }


def code_commit() -> str:
    """Commit of the checkout that this code runs from, `-dirty` when it has changes; `unknown` outside a checkout."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return "unknown"
    return commit + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no") else "")


def read_summary(directory: Path) -> dict[str, Any] | None:
    """What a finished run's done.json says (`Run.finish`); None while the run is not finished."""
    file = directory / "done.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def write_json(path: Path, data: Any) -> None:
    """Atomically, indented by 2, ASCII only."""
    write_text(path, json.dumps(data, indent=2) + "\n")


def write_jsonl(path: Path, rows: Iterable[Any]) -> None:
    """A line for each row."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write_text(path: Path, text: str) -> None:
    """Atomically, as UTF-8: a reader sees the old file or the whole new one."""
    with atomic_replace(path) as temporary:
        Path(temporary).write_text(text, encoding="utf-8")


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


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _git(*arguments: str) -> str:
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
