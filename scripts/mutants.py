"""Breaks the code on purpose, one change at a time, and says whether the tests that should notice do.

    python scripts/mutants.py                          # all rows of tests/mutants.yaml, each in a scratch copy of the tree
    python scripts/mutants.py --only rollouts-native --jobs 2 --json benchmarks/results/mutants/result.json

The tests that a row names must fail with its change, and must pass without any. Exit code 1 when a change survives.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "tests" / "mutants.yaml"
OUTPUT = "pytest.out"
PRELOADED = ("torch", "transformers.generation", "peft", "accelerate.utils", "datasets", "hydra", "safetensors.torch")


@dataclass(frozen=True)
class Mutant:
    """One change that the tests must notice.

    Attributes:
        name: what goes wrong, in a few words.
        file, find, replace: where (below the root), the text that occurs there once, what stands there instead.
        tests: pytest node ids; each of them must fail.
    """

    name: str
    file: str
    find: str
    replace: str
    tests: list[str]

    def applied(self, text: str) -> str:
        """The file's text with the change. Raises ValueError unless `find` occurs exactly once."""
        count = text.count(self.find)
        if count != 1:
            raise ValueError(f"{self.name}: its text occurs {count} times in {self.file}, not once: {self.find!r}")
        return text.replace(self.find, self.replace)


def read_mutants() -> list[Mutant]:
    """The rows, in their order."""
    return [Mutant(**row) for row in yaml.safe_load(ROWS.read_text(encoding="utf-8"))]


def copied_tree(target: Path) -> Path:
    """A folder with the files that git keeps or would keep, as they are on the disk."""
    for name in git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def start_pytest(tree: Path, tests: Iterable[str]) -> int:
    """Start a copy of this process, with `PRELOADED` imported, that runs the tests on the tree's own code; returns its id."""
    if pid := os.fork():
        return pid
    os.chdir(tree)
    os.environ["PYTHONPATH"] = sys.path[0] = str(tree)
    sys.dont_write_bytecode = True  # it is found again by time and size of its source, which a change may leave
    os.dup2(os.open(OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    code = pytest.main(["-q", "-n0", "-rfE", "--tb=no", "-p", "no:cacheprovider", *tests])
    sys.stdout.flush()
    os._exit(int(code))


def failed_in(tree: Path) -> list[str]:
    """Ids of the tests that failed (or whose set-up did) in the last process on the tree."""
    lines = (line.split(" ") for line in (tree / OUTPUT).read_text(encoding="utf-8").splitlines())
    return [line[1] for line in lines if line[0] in ("FAILED", "ERROR") and len(line) > 1]


def try_all(mutants: Sequence[Mutant], trees: list[Path]) -> list[dict[str, Any]]:
    """Every mutant on one of the trees, so many at a time; a tree is put back before the next one.

    Returns of each its name, the verdict (killed, survived, or broken: pytest could not run), killed_by and unnoticed_by.
    """
    waiting, outcomes = list(mutants), []
    running: dict[int, tuple[Mutant, Path, str]] = {}
    while waiting or running:
        if waiting and trees:
            mutant, tree = waiting.pop(0), trees.pop()
            text = (tree / mutant.file).read_text(encoding="utf-8")
            (tree / mutant.file).write_text(mutant.applied(text), encoding="utf-8")
            running[start_pytest(tree, mutant.tests)] = mutant, tree, text
            continue
        pid, status = os.wait()
        mutant, tree, text = running.pop(pid)
        (tree / mutant.file).write_text(text, encoding="utf-8")
        trees.append(tree)
        failed, code = failed_in(tree), os.waitstatus_to_exitcode(status)
        unnoticed = [test for test in mutant.tests if not any(f"{node}[".startswith(f"{test}[") for node in failed)]
        verdict = "broken" if code not in (0, 1) else "survived" if unnoticed else "killed"
        print(f"{verdict:8} {mutant.name}", *unnoticed, flush=True)
        outcomes.append({"name": mutant.name, "verdict": verdict, "killed_by": failed, "unnoticed_by": unnoticed})
    return outcomes


def git(*args: str) -> str:
    """What git prints, run in this checkout."""
    return subprocess.run(["git", *args], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Try the mutants, print a line for each and the sum; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this one; again for more")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    args = parser.parse_args()
    chosen = [mutant for mutant in read_mutants() if not args.only or mutant.name in args.only]
    if len(chosen) < len({*args.only}):
        parser.error(f"--only: {', '.join(args.only)} are not all names of rows in {ROWS.relative_to(ROOT)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unhandled, it would leave the copies behind
    commit = git("rev-parse", "HEAD") + "-dirty" * bool(git("status", "--porcelain"))
    for module in PRELOADED:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [copied_tree(Path(folder) / str(number)) for number in range(args.jobs)]
        _, status = os.waitpid(start_pytest(trees[0], dict.fromkeys(t for m in chosen for t in m.tests)), 0)
        if status:
            sys.exit(f"error: the tests fail before any change, mend that first: {', '.join(failed_in(trees[0]))}")
        outcomes = try_all(chosen, trees)
    killed = sum(outcome["verdict"] == "killed" for outcome in outcomes)
    print(f"{killed} of {len(outcomes)} killed")
    if args.json:
        date, machine = f"{datetime.date.today()}", f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
        found = {"commit": commit, "machine": machine, "date": date, "mutants": outcomes}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(killed < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
