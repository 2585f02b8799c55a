"""The disk-bound A/B in one run: every arm, served K and disk, as rows, a table and plots.

    python benchmarks/disk_bound.py models results/disk_bound                    # all cells
    python benchmarks/disk_bound.py models results/disk_bound --k 4 --disks 200 400 --rounds 3

`models` gets synthetic checkpoints of disk_bound.yaml where they are missing: one for each K, with a plain and a sticky tier of
the same heads. The other folder gets rows.jsonl, table.md and plots. A cell is one K, disk and tier: a process in which the
arms replay the greedy answer of on_demand, first unmeasured on the real disk, then there and back behind the simulated one of
benchmarks/slow_disk.py. `real` is this machine's disk, in a control group smaller than the experts (root). A cell whose rows are
there isn't run again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.record import ROOT, Row, add_rows, circumstances, read_rows
from benchmarks.slow_disk import SlowDisk
from edge0_runtime.contract.edge import parser_of
from edge0_runtime.engine import Engine
from edge0_runtime.measure.ab import compare, ratios
from edge0_runtime.units import MISSING

MIB = 2**20
ARMS = ("on_demand", "oracle", "prerouter", "lookahead", "resident")
STICKY_ARMS = ("on_demand", "prerouter")
STICKY = "prerouter+sticky"
BIAS_WINDOW = "2,2"
TIER = "disk-bound-synthetic"  # as make_synthetic_checkpoint.py names it; the sticky one ends in -sticky
REAL = "real"
PROMPT = "Hi"
BUDGET_GIB = {2: 0.45, 4: 0.45, 8: 0.62}
GROUP_GIB = {2: 1.2, 4: 1.2, 8: 1.4}  # of the control group: the experts are 1.7
# Of an answer: as many as a cell's time allows, most where a goal is set.
TOKENS = {
    2: {"100": 12, "200": 16, "400": 20, REAL: 12},
    4: {"100": 12, "200": 24, "400": 24, REAL: 12},
    8: {"100": 6, "200": 8, "400": 12, REAL: 8},
}


class Cell(NamedTuple):
    """What one process measures: served K, disk in MiB/s or `real`, whether the tier is sticky; which repetition it is."""

    k: int
    disk: str
    sticky: bool
    round: int

    def has(self, row: Row) -> bool:
        """Whether the row is this cell's."""
        return all(row[name] == value for name, value in self._asdict().items())


def main() -> None:
    """Entry point; the arguments are those of the module's docstring."""
    parser = parser_of(__doc__)
    parser.add_argument("models", type=Path, help="folder of the checkpoints")
    parser.add_argument("out", type=Path, help="folder of the rows")
    parser.add_argument("--k", type=int, nargs="+", default=[2, 4, 8], choices=sorted(TOKENS))
    parser.add_argument("--disks", nargs="+", default=["100", "200", "400", REAL], choices=list(TOKENS[4]))
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="times each cell (%(default)s)")
    parser.add_argument("--plain", action="store_true", help="without the sticky tier")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        for row in measure(Cell(*json.loads(args.cell)), args.models):
            print(json.dumps(row), flush=True)
        return
    tiers = [False] if args.plain else [False, True]
    for cell in [
        Cell(k, disk, sticky, number)
        for number in range(args.rounds)
        for k in args.k
        for disk in args.disks
        for sticky in tiers
    ]:
        run(cell, args.models, args.out)
    rows = read_rows(args.out / "rows.jsonl")
    text = table(rows)
    (args.out / "table.md").write_text(text)
    print(text, end="")
    draw(rows, args.out)


# -- measuring -------------------------------------------------------------------------------------------------------


def run(cell: Cell, models: Path, out: Path) -> None:
    """Measure the cell in a process of its own and add its rows, unless they are there."""
    if any(map(cell.has, read_rows(out / "rows.jsonl"))):
        return
    make_checkpoint(cell.k, models)
    command = [sys.executable, __file__, str(models), str(out), "--cell", json.dumps(cell)]
    if cell.disk == REAL:
        group = [sys.executable, str(ROOT / "benchmarks/in_cgroup.py"), "--memory-gib", str(GROUP_GIB[cell.k])]
        command = [*group, "--", *command]
    found, began = circumstances(), time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{cell} exited {done.returncode}; the same command goes on from here")
    add_rows(out / "rows.jsonl", [json.loads(line) | found for line in done.stdout.splitlines()])
    print(
        f"{cell}: {time.monotonic() - began:.0f} s, load before it {found['load'][0]:.1f}", file=sys.stderr, flush=True
    )


def make_checkpoint(k: int, models: Path) -> Path:
    """The checkpoint at that K; written, if it isn't there."""
    directory = models / f"disk-bound-k{k}"
    if not directory.exists():
        script, tier = ROOT / "scripts/make_synthetic_checkpoint.py", ROOT / "benchmarks/disk_bound.yaml"
        models.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(script), str(tier), str(directory), "--k", str(k), "--sticky", BIAS_WINDOW]
        subprocess.run(command, stdout=sys.stderr, check=True)
    return directory


def load(directory: Path, sticky: bool = False, **options: Any) -> Engine:
    """The engine with the checkpoint's plain or sticky tier and two I/O threads; `options` as in `Engine.load`."""
    return Engine.load(directory, tier_name=TIER + ("-sticky" if sticky else ""), io_threads=2, **options)


def measure(cell: Cell, models: Path) -> Iterator[Row]:
    """The cell's rows, as `edge0_runtime.measure.ab.compare` gives them, with the cell's fields."""
    directory = make_checkpoint(cell.k, models)
    disk = SlowDisk(math.inf)
    os.preadv = disk.slowed(os.preadv, int)

    def slow_down() -> None:
        if cell.disk != REAL:
            disk.bytes_per_second = float(cell.disk) * MIB

    arms = [arm for arm in (STICKY_ARMS if cell.sticky else ARMS) if (arm, cell.disk) != ("resident", REAL)]
    with contextlib.ExitStack() as engines:
        engine = engines.enter_context(load(directory, cell.sticky, memory_budget=BUDGET_GIB[cell.k]))
        resident = None
        if "resident" in arms:
            resident = engines.enter_context(load(directory, arm="resident", prerouter=False))
        for row in compare(
            engine,
            [engine.tokenizer.encode(PROMPT)],
            arms=arms,
            max_tokens=TOKENS[cell.k][cell.disk],
            rounds=1,
            page_cache="run" if cell.disk == REAL else "keep",
            resident=resident,
            before_measuring=slow_down,
        ):
            named = STICKY if cell.sticky and row["arm"] == "prerouter" else row["arm"]
            yield row | cell._asdict() | {"arm": named}


# -- reading ---------------------------------------------------------------------------------------------------------


def middle(rows: Sequence[Row], of: Callable[[Row], float]) -> float:
    """The median; NaN where there is no row."""
    return statistics.median(map(of, rows)) if rows else math.nan


def over_on_demand(rows: Sequence[Row], arm: str) -> list[float]:
    """Paired ratios of decode speed, each with its neighbour of the same process; sorted."""
    return sorted(
        ratio
        for sticky in (False, True)
        for ratio in ratios([r for r in rows if r["sticky"] == sticky], arm, "on_demand")
    )


def roofline_ms(arm: Sequence[Row], resident: Sequence[Row]) -> float:
    """The longer of computing, with all experts in memory, and the arm's bytes at the disk's speed; ms a step.

    NaN where nothing was measured with all experts in memory.
    """
    if not resident:
        return math.nan

    def reading(row: Row) -> float:
        speed = row["plan"]["disk_bytes_per_second"] if row["disk"] == REAL else float(row["disk"]) * MIB
        return 1e3 * float(row["decode_expert_bytes_per_step"]) / speed

    return max(middle(arm, reading), middle(resident, lambda row: float(row["decode_step_ms_p50"])))


def table(rows: Sequence[Row]) -> str:
    """A Markdown line for each K, disk and arm: medians over its runs, ratios with their range."""
    lines = [
        "| K | disk, MiB/s | arm | tok/s | over on_demand | of oracle | of the roofline | waiting | MiB a step | loads |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for k, disk in dict.fromkeys((row["k"], row["disk"]) for row in rows):
        here = [row for row in rows if (row["k"], row["disk"]) == (k, disk)]
        resident = [row for row in rows if (row["k"], row["arm"]) == (k, "resident")]
        oracle = over_on_demand(here, "oracle")
        for arm in dict.fromkeys((*ARMS[1:3], STICKY, *ARMS[3:], ARMS[0])):
            own = [row for row in here if row["arm"] == arm and not (row["sticky"] and arm == "on_demand")]
            if not own:
                continue
            ratio = over_on_demand(here, arm)
            speed = middle(own, lambda row: float(row["decode_tokens_per_second"]))
            reads = arm != "resident"
            lines.append(
                f"| {k} | {disk} | {arm} | {speed:.2f} | {statistics.median(ratio):.2f} ({ratio[0]:.2f} to {ratio[-1]:.2f})"
                f" | {_part(statistics.median(ratio) / statistics.median(oracle) if oracle else math.nan)}"
                f" | {_part(speed * roofline_ms(own, resident) / 1e3 if reads else math.nan)}"
                f" | {middle(own, lambda row: 100 * float(row['decode_blocked_share'])):.1f} %"
                f" | {middle(own, lambda row: float(row['decode_expert_bytes_per_step']) / MIB):.0f}"
                f" | {middle(own, lambda row: float(row['decode_expert_loads_per_step'])):.1f} |"
            )
    return "\n".join(lines) + "\n"


def _part(value: float) -> str:
    return MISSING if math.isnan(value) else f"{value:.2f}"


def draw(rows: Sequence[Row], out: Path) -> None:
    """Speed and where a step's time goes, a plot for each disk."""
    from benchmarks.plot_arms import draw as draw_arms  # matplotlib is for plots alone

    for disk in dict.fromkeys(row["disk"] for row in rows):
        here = [r for r in rows if r["disk"] == disk and not (r["sticky"] and r["arm"] == "on_demand")]
        draw_arms(here, out / disk, ("speed", "step"))


if __name__ == "__main__":
    main()
