"""The curve: what an arm reads and what that costs, over seeds, with errors; as a table, as data and as a plot."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.measure.quality import mean_and_error
from edge0_train.report import table
from edge0_train.run import write_jsonl, write_text
from recipes.sticky.arms import Arm

STAGE = "on_policy"
PLAIN_K4 = Arm(4)
PLOTTED = (8, 16)
"""Experts held of a layer in the plot's two panels."""


@dataclass(frozen=True)
class Difference:
    """Mean over seeds of what an arm has more than another; its standard error over seeds, and over rows."""

    mean: float
    seeds: float
    rows: float

    def __str__(self) -> str:
        """For a table: the mean, and the larger of both errors."""
        return f"{self.mean:+.4f} +- {self.error:.4f}"

    @property
    def error(self) -> float:
        """The larger of both: over three seeds, the one over seeds is itself uncertain by a third."""
        return max(self.seeds, self.rows)


def read(out: Path) -> dict[Arm, dict[int, dict[str, Any]]]:
    """{arm: {seed: its measurement after on-policy}} of all that lie below `out`. Raises Edge0Error when there is none."""
    found: dict[Arm, dict[int, dict[str, Any]]] = {}
    for file in sorted(out.glob("seed*/*.json")):
        data = json.loads(file.read_text())
        arm = Arm(data["k"], data["bias"], data["window"], data["bend"])
        found.setdefault(arm, {})[data["seed"]] = data["stages"][STAGE]
    if not found:
        raise Edge0Error(f"{out}: no arm is measured there; run recipes.sticky.run --seeds 0 --out {out} first")
    return dict(sorted(found.items(), key=lambda item: (-item[0].k, item[0].bend, item[0].bias, item[0].window)))


def kl_difference(one: dict[int, dict[str, Any]], other: dict[int, dict[str, Any]]) -> Difference:
    """In KL a token, on the same rows, over the seeds that both have."""
    means, errors = [], []
    for seed in sorted(one.keys() & other.keys()):
        more_R = torch.tensor(one[seed]["kl"], dtype=torch.float64) - torch.tensor(
            other[seed]["kl"], dtype=torch.float64
        )
        mean, error = mean_and_error(more_R, torch.tensor(one[seed]["tokens"]))
        means.append(mean)
        errors.append(error)
    return _over_seeds(means, errors)


def match_difference(one: dict[int, dict[str, Any]], other: dict[int, dict[str, Any]]) -> Difference:
    """In exact match, on the same problems, over the seeds that both have."""
    means, errors = [], []
    for seed in sorted(one.keys() & other.keys()):
        more_R = [int(a) - int(b) for a, b in zip(one[seed]["right"], other[seed]["right"], strict=True)]
        means.append(statistics.fmean(more_R))
        errors.append(statistics.stdev(more_R) / math.sqrt(len(more_R)))
    return _over_seeds(means, errors)


def _over_seeds(means: Sequence[float], errors: Sequence[float]) -> Difference:
    seeds = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0
    return Difference(statistics.fmean(means), seeds, math.sqrt(sum(e * e for e in errors)) / len(errors))


def rows(found: dict[Arm, dict[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """One line an arm; differences are from the same K without stickiness, and of all from K=4 without."""
    lines = []
    for arm, seeds in found.items():
        means = [of_seed["mean"] for of_seed in seeds.values()]
        line: dict[str, Any] = {
            "K": arm.k,
            "bias, window": f"{arm.bias:g}, {arm.window}" if arm.window else "none",
            "bend": arm.bend or "none",
            "seeds": len(seeds),
            "experts": round(statistics.fmean(m["experts"] for m in means), 2),
        }
        for size in (4, 8, 12, 16):
            values = [m[f"misses {size}"] for m in means if f"misses {size}" in m]
            line[f"LRU {size}"] = round(statistics.fmean(values), 2) if values else None
        plain = found.get(arm.plain) or found.get(Arm(arm.k))
        twice = f"LRU {2 * arm.k}" if arm.k > 2 else "LRU 4"
        if plain and plain.keys() & seeds.keys():
            shared = [s["mean"] for n, s in plain.items() if n in seeds]
            before = statistics.fmean(m[f"misses {twice[4:]}"] for m in shared)
            line["fewer at 2K"] = f"{1 - line[twice] / before:.0%}" if before else None
        line["KL"] = round(statistics.fmean(m["kl"] for m in means), 5)
        line["exact match"] = round(statistics.fmean(m["exact_match"] for m in means), 4)
        for name, reference in (("same K", plain), ("K=4", found.get(PLAIN_K4))):
            if reference and reference is not seeds and reference.keys() & seeds.keys():
                line[f"KL more than plain {name}"] = str(kl_difference(seeds, reference))
                line[f"exact match more than plain {name}"] = str(match_difference(seeds, reference))
        lines.append(line)
    return lines


def report(out: Path) -> str:
    """Write table.jsonl, table.txt and curve.png below `out`; returns the table."""
    found = read(out)
    lines = rows(found)
    columns = list(dict.fromkeys(name for line in lines for name in line))
    text = table(columns, [[line.get(column) for column in columns] for line in lines])
    write_jsonl(out / "table.jsonl", lines)
    write_text(out / "table.txt", text + "\n")
    plot(found, out / "curve.png")
    return text


def plot(found: dict[Arm, dict[int, dict[str, Any]]], file: Path) -> None:
    """KL over misses, a panel for each of `PLOTTED`; whiskers are standard errors over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(PLOTTED), figsize=(6 * len(PLOTTED), 4.5), squeeze=False)
    for axes, size in zip(panels[0], PLOTTED, strict=True):
        for colour, k in enumerate(sorted({arm.k for arm in found})):
            for bent in (False, True):
                points = [
                    (arm, [s["mean"] for s in seeds.values()])
                    for arm, seeds in found.items()
                    if arm.k == k and bool(arm.bend) == bent
                ]
                points = [(arm, means) for arm, means in points if f"misses {size}" in means[0]]
                if not points:
                    continue
                x = [statistics.fmean(m[f"misses {size}"] for m in means) for _, means in points]
                y = [statistics.fmean(m["kl"] for m in means) for _, means in points]
                wide = [
                    statistics.stdev(m["kl"] for m in means) / math.sqrt(len(means)) if len(means) > 1 else 0
                    for _, means in points
                ]
                axes.errorbar(
                    x, y, wide, fmt="x" if bent else "o", color=f"C{colour}", label=f"K={k}{', bent' * bent}", capsize=3
                )
                for (arm, _), a, b in zip(points, x, y, strict=True):
                    rule = f"{arm.bias:g},{arm.window}" if arm.window else "none"
                    label = f"{rule} {arm.bend}".strip()
                    axes.annotate(label, (a, b), textcoords="offset points", xytext=(4, 4), fontsize=7)
        axes.set_xlabel(f"experts read a token and layer, {size} held")
        axes.set_ylabel("KL to the teacher, nats a token")
        axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)
