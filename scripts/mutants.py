"""Breaks the code on purpose, one change at a time, and says whether the tests that should notice do.

    python scripts/mutants.py                          # all rows of tests/mutants.yaml, each in a scratch copy of the tree
    python scripts/mutants.py --only rollouts-native --only joint-heads-at-full-rate
    python scripts/mutants.py --jobs 2 --json benchmarks/results/mutants/result.json

A row names a file, the text to find in it (exactly once), what to put there, and the tests that must fail then. Before
that, the same tests must pass on the copy as it is. Exit code 1 when a change survives.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "tests" / "mutants.yaml"


@dataclass(frozen=True)
class Mutant:
    """One change that the tests must notice.

    Attributes:
        name: what goes wrong, in a few words.
        file: path below the root. find: text that occurs in it once. replace: what stands there instead.
        tests: pytest node ids; each of them must fail.
    """

    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """The file's text with the change. Raises ValueError unless `find` occurs exactly once."""
        count = text.count(self.find)
        if count != 1:
            raise ValueError(f"{self.name}: its text occurs {count} times in {self.file}, not once: {self.find!r}")
        return text.replace(self.find, self.replace)


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: killed, survived (`passed` are the tests that did not notice) or broken (pytest itself failed)."""

    name: str
    verdict: str
    killed_by: tuple[str, ...]
    passed: tuple[str, ...]
    seconds: float


def read_mutants(path: Path = ROWS) -> list[Mutant]:
    """The rows of the file, in its order."""
    rows = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def copy_tree(target: Path) -> None:
    """The files that git keeps, and new ones that it does not ignore, as they are on the disk."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def failing(tree: Path, tests: Iterable[str]) -> tuple[int, list[str]]:
    """pytest's exit code on the tree, and the ids of the tests that failed (or whose set-up did)."""
    # Bytecode is found again by time and size of its source, which a change may leave as they were.
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-rfE", "--tb=no", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    lines = (line.split(" ") for line in done.stdout.splitlines())
    return done.returncode, [line[1] for line in lines if line[0] in ("FAILED", "ERROR") and len(line) > 1]


def tried(mutant: Mutant, tree: Path) -> Outcome:
    """The mutant's tests on the tree with the change in it; the tree is put back."""
    file, began = tree / mutant.file, time.monotonic()
    before = file.read_text(encoding="utf-8")
    try:
        file.write_text(mutant.applied(before), encoding="utf-8")
        code, failed = failing(tree, mutant.tests)
    finally:
        file.write_text(before, encoding="utf-8")
    passed = tuple(test for test in mutant.tests if not any(node.startswith(test) for node in failed))
    verdict = "broken" if code not in (0, 1) else "survived" if passed else "killed"
    return Outcome(mutant.name, verdict, tuple(failed), passed, round(time.monotonic() - began, 1))


def try_all(mutants: Sequence[Mutant], jobs: int) -> list[Outcome]:
    """Every mutant in one of `jobs` copies. Exits with a sentence if their tests fail without any change."""
    with ExitStack() as stack:
        trees: queue.Queue[Path] = queue.Queue()
        for _ in range(jobs):
            tree = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants-")))
            copy_tree(tree)
            trees.put(tree)

        def one(mutant: Mutant) -> Outcome:
            tree = trees.get()
            try:
                outcome = tried(mutant, tree)
            finally:
                trees.put(tree)
            print(f"{outcome.verdict:8} {outcome.seconds:5.0f} s  {mutant.name}", flush=True)
            return outcome

        code, failed = failing(tree, dict.fromkeys(test for mutant in mutants for test in mutant.tests))
        if code:
            sys.exit(
                f"error: without a change pytest ends with {code}, {', '.join(failed) or 'no test failed'}; fix that first"
            )
        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(one, mutants))


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
    mutants = read_mutants()
    unknown = {*(args.only or ())} - {mutant.name for mutant in mutants}
    if unknown:
        parser.error(f"--only {', '.join(sorted(unknown))}: no such row in {ROWS.relative_to(ROOT)}")
    commit = git("rev-parse", "HEAD") + "-dirty" * bool(git("status", "--porcelain"))
    outcomes = try_all([m for m in mutants if not args.only or m.name in args.only], args.jobs)
    for outcome in outcomes:
        if outcome.passed:
            print(f"{outcome.verdict}: {outcome.name}; not noticed by {', '.join(outcome.passed)}")
    killed = sum(outcome.verdict == "killed" for outcome in outcomes)
    print(f"{killed} of {len(outcomes)} killed")
    if args.json:
        machine = (
            f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        )
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        facts = {"commit": commit, "machine": machine, "date": date, "killed": killed, "of": len(outcomes)}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**facts, "mutants": [asdict(o) for o in outcomes]}, indent=1) + "\n")
    return int(killed < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
