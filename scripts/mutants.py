"""Breaks the code on purpose, one change at a time, and says whether the tests that should notice do.

    python scripts/mutants.py                          # all rows of tests/mutants.yaml, each in a scratch copy of the tree
    python scripts/mutants.py --only rollouts-native --only joint-heads-at-full-rate
    python scripts/mutants.py --jobs 2 --json benchmarks/results/mutants/result.json

The tests that a row names must fail with its change, and must pass without any. Exit code 1 when a change survives.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "tests" / "mutants.yaml"


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


Outcome = dict[str, Any]
"""Of a mutant: name; verdict (killed, survived, or broken: pytest could not run); killed_by, unnoticed_by (tests); seconds."""


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


def failing(tree: Path, tests: Iterable[str]) -> tuple[int, list[str]]:
    """pytest's exit code on the tree, and the ids of the tests that failed (or whose set-up did)."""
    # Bytecode is found again by time and size of its source, which a change may leave as they were.
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-rfE", "--tb=no", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    lines = (line.split(" ") for line in done.stdout.splitlines())
    return done.returncode, [line[1] for line in lines if line[0] in ("FAILED", "ERROR") and len(line) > 1]


def tried(mutant: Mutant, trees: queue.Queue[Path]) -> Outcome:
    """The mutant's tests on one of the trees with the change in it; the tree is put back as it was."""
    tree, began = trees.get(), time.monotonic()
    before = (tree / mutant.file).read_text(encoding="utf-8")
    (tree / mutant.file).write_text(mutant.applied(before), encoding="utf-8")
    code, failed = failing(tree, mutant.tests)
    (tree / mutant.file).write_text(before, encoding="utf-8")
    trees.put(tree)
    unnoticed = [test for test in mutant.tests if not any(f"{node}[".startswith(f"{test}[") for node in failed)]
    verdict = "broken" if code not in (0, 1) else "survived" if unnoticed else "killed"
    outcome = {"name": mutant.name, "verdict": verdict, "killed_by": failed, "unnoticed_by": unnoticed}
    print(f"{verdict:8} {mutant.name}", *unnoticed, flush=True)
    return outcome | {"seconds": round(time.monotonic() - began, 1)}


def try_all(mutants: Sequence[Mutant], jobs: int) -> list[Outcome]:
    """Every mutant in one of `jobs` copies. Exits with a sentence if their tests fail without any change."""
    trees: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for number in range(jobs):
            trees.put(copied_tree(Path(folder) / str(number)))
        code, failed = failing(trees.queue[0], dict.fromkeys(test for mutant in mutants for test in mutant.tests))
        if code:
            sys.exit(f"error: pytest ends with {code} before any change, fix that first: {', '.join(failed)}")
        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(lambda mutant: tried(mutant, trees), mutants))


def git(*args: str) -> str:
    """What git prints, run in this checkout."""
    return subprocess.run(["git", *args], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Try the mutants, print a line for each and the sum; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="this one; may be given several times")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    args = parser.parse_args()
    chosen = [mutant for mutant in read_mutants() if not args.only or mutant.name in args.only]
    if len(chosen) < len({*(args.only or ())}):
        parser.error(f"--only: {', '.join(args.only)} are not all names of rows in {ROWS.relative_to(ROOT)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unhandled, it would leave the copies behind
    commit = git("rev-parse", "HEAD") + "-dirty" * bool(git("status", "--porcelain"))
    outcomes = try_all(chosen, args.jobs)
    killed = sum(outcome["verdict"] == "killed" for outcome in outcomes)
    print(f"{killed} of {len(outcomes)} killed")
    if args.json:
        facts = {"commit": commit, "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"}
        facts["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(facts | {"mutants": outcomes}, indent=1) + "\n")
    return int(killed < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
