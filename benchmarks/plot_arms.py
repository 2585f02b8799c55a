"""Four plots from the JSON lines of `edge0_runtime bench --arms ... --json`, several files for several K.

    python benchmarks/plot_arms.py k2.jsonl k4.jsonl k8.jsonl --out plots/

Writes speed.png (decode tok/s by arm and K), step.png (where a step's time goes), traffic.png (bytes and loads) and
memory.png, and prints the table of each K. Bars are medians, whiskers the range of all runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from edge0_runtime.measure.ab import table

GIB, MIB = 2**30, 2**20
Row = dict[str, Any]


def values(rows: Sequence[Row], k: int, arm: str, of: Callable[[Row], float | None]) -> list[float]:
    """All runs' values, in order; [0] where none has one."""
    found = [of(row) for row in rows if (row["k"], row["arm"]) == (k, arm)]
    return sorted(value for value in found if value is not None) or [0.0]


def bars(
    axes: Any, rows: Sequence[Row], parts: Sequence[tuple[str, Callable[[Row], float | None]]], label: str
) -> None:
    """One bar for each K and arm; `parts` are stacked."""
    ks, arms = sorted({row["k"] for row in rows}), list(dict.fromkeys(row["arm"] for row in rows))
    width = 0.8 / len(arms)
    for number, arm in enumerate(arms):
        places = [index + number * width for index in range(len(ks))]
        bottom = [0.0] * len(ks)
        for shade, (name, of) in enumerate(parts):
            found = [values(rows, k, arm, of) for k in ks]
            heights = [statistics.median(part) for part in found]
            errors = [[h - part[0] for h, part in zip(heights, found, strict=True)],
                      [part[-1] - h for h, part in zip(heights, found, strict=True)]]  # fmt: skip
            axes.bar(
                places, heights, width * 0.95, bottom=bottom, color=f"C{number}", alpha=1 - 0.55 * shade,
                yerr=errors if len(parts) == 1 else None, label=f"{arm}{', ' + name if len(parts) > 1 else ''}",
            )  # fmt: skip
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks([index + 0.4 - width / 2 for index in range(len(ks))], [f"K={k}" for k in ks])
    axes.set_ylabel(label)
    axes.set_ylim(top=1.3 * axes.get_ylim()[1])  # room for the legend
    axes.legend(fontsize="small", ncols=2)


def main() -> None:
    """Entry point; the arguments are those of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("."))
    args = parser.parse_args()
    rows = [json.loads(line) for path in args.files for line in path.read_text().splitlines()]
    for k in sorted({row["k"] for row in rows}):
        own = [row for row in rows if row["k"] == k]
        print(table(own, own[-1]["arm"] if own[0]["arm"] == "on_demand" else "on_demand"), end="\n\n")
    draw(rows, args.out)


def draw(rows: Sequence[Row], out: Path, only: Sequence[str] = ()) -> None:
    """Write the plots, or those of `only`, and print their paths."""
    figures: dict[str, list[tuple[list[tuple[str, Callable[[Row], float | None]]], str]]] = {
        "speed": [([("", lambda row: row["decode_tokens_per_second"])], "decode tok/s")],
        "step": [([
            ("blocked", lambda row: statistics.fmean(row["decode_blocked_ms"])),
            ("rest", lambda row: statistics.fmean(row["decode_step_ms"]) - statistics.fmean(row["decode_blocked_ms"])),
        ], "ms a token (mean)")],
        "traffic": [
            ([("", lambda row: row["decode_expert_bytes_per_step"] / MIB)], "requested MiB a token"),
            ([("", lambda row: row["decode_expert_loads_per_step"])], "experts read a token"),
        ],
        "memory": [
            ([("", lambda row: row["mlx_peak_bytes"] / GIB)], "MLX allocator peak, GiB"),
            ([("", lambda row: row["process_peak_rss_bytes"] / GIB)], "process peak RSS, GiB"),
            ([("", lambda row: (row["page_cache_bytes_after"] or 0) / GIB)], "page cache of the experts' files, GiB"),
        ],
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    for name in only or figures:
        panels = figures[name]
        figure, axes = plt.subplots(1, len(panels), figsize=(6 * len(panels), 4), squeeze=False)
        for place, (parts, label) in zip(axes[0], panels, strict=True):
            bars(place, rows, parts, label)
        figure.tight_layout()
        figure.savefig(out / f"{name}.png", dpi=120)
        print(out / f"{name}.png")


if __name__ == "__main__":
    main()
