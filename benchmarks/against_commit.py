"""This checkout against another commit: the same command in both, in turns, as paired ratios of decode speed.

    python benchmarks/against_commit.py 5649e28 --rounds 3 -- benchmarks/all_cached.py models/nano
    python benchmarks/against_commit.py 5649e28 --rounds 2 -- benchmarks/slow_disk.py --mib-s 400 bench models/bound-k4 \
        --io-threads 2 --memory-budget 0.45 --max-tokens 32 --arms prerouter,on_demand --rounds 1 --prompt Hi --json

The command is what follows `python`; it must print `bench`'s JSON rows, or all_cached.py's lines. The other commit is
checked out into a temporary worktree and runs with its own sources. Order: new old, old new, ...; a pair is two runs next to
each other in time, and a run's figure for an arm is the median over its rows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Print a line for each arm."""
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        None, None, description, epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", help="the other one")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="pairs of runs (%(default)s)")
    parser.usage = "%(prog)s [-h] [--rounds N] commit -- COMMAND"
    own, _, rest = " ".join(map(shlex.quote, sys.argv[1:])).partition(" -- ")
    args, command = parser.parse_args(shlex.split(own)), shlex.split(rest)
    if not command:
        parser.error("no command; give -- and what follows `python`")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unhandled, it would leave the worktree behind
    with other_checkout(args.commit) as other:
        runs: dict[Path, list[dict[str, float]]] = {ROOT: [], other: []}
        for number in range(args.rounds):
            for tree in (ROOT, other) if number % 2 == 0 else (other, ROOT):
                runs[tree].append(speeds(tree, command))
                print(f"{'new' if tree == ROOT else 'old'} {runs[tree][-1]}", file=sys.stderr, flush=True)
    load = os.getloadavg()[0]
    print(f"{git('rev-parse', '--short', 'HEAD')} over {args.commit}, load {load:.1f}: {' '.join(command)}")
    for arm in runs[ROOT][0]:
        print(line(arm, [run[arm] for run in runs[ROOT]], [run[arm] for run in runs[other]]))


@contextmanager
def other_checkout(commit: str) -> Iterator[Path]:
    """A worktree of the commit, removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "other"
        git("worktree", "add", "--quiet", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def git(*args: str) -> str:
    """What git prints, run in this checkout."""
    return subprocess.run(["git", *args], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def speeds(tree: Path, command: Sequence[str]) -> dict[str, float]:
    """Arm -> median decode tokens/s of one run of the command on that tree's sources."""
    environment = os.environ | {"PYTHONPATH": str(tree)}
    arguments = [str(tree / part) if part.startswith("benchmarks/") else part for part in command]
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{tree}: {' '.join(arguments)} exited {done.returncode}: {done.stderr.strip()}")
    found: dict[str, list[float]] = {}
    for row in done.stdout.splitlines():
        if row.startswith("{"):
            fields = json.loads(row)
            found.setdefault(fields["arm"], []).append(fields["decode_tokens_per_second"])
        elif match := re.match(r"(.+?) +([\d.]+) tok/s", row):
            found.setdefault(match[1], []).append(float(match[2]))
    return {arm: statistics.median(values) for arm, values in found.items()}


def line(arm: str, new: Sequence[float], old: Sequence[float]) -> str:
    """Medians of both, and the paired ratios with their range."""
    ratios = sorted(a / b for a, b in zip(new, old, strict=True))
    return (
        f"{arm:<11} new {statistics.median(new):8.2f} tok/s, old {statistics.median(old):8.2f}; new over old"
        f" {statistics.median(ratios):.3f} ({ratios[0]:.3f}..{ratios[-1]:.3f}, {len(ratios)} pairs)"
    )


if __name__ == "__main__":
    main()
