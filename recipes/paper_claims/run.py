"""The paper's claims on the nano tier: trains every arm for several seeds, and says which claims hold.

    python -m recipes.paper_claims.run --seeds 0 1 2                 # all arms
    python -m recipes.paper_claims.run --seeds 0 --quick             # a smoke test
    python -m recipes.paper_claims.run --only paper ours             # two arms and what they rest on
    python -m recipes.paper_claims.run --report                      # table, plot and verdicts from what is there

Everything lies below --out: <out>/base, <out>/seed<N>/<run>/ (ordinary run directories), <out>/seed<N>/arms/<arm>.json, and the
results table.jsonl, table.txt, claims.txt, claims.png. What is finished is not done again; an interrupted run continues.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from edge0_runtime.contract.artifacts import Adapter
from edge0_runtime.contract.errors import Edge0Error
from edge0_train.build import load_heads
from edge0_train.cli import run_phase
from edge0_train.config import Config
from edge0_train.data.rows import text_of
from edge0_train.measure.bench import Bench, Stage, open_bench, running
from edge0_train.measure.drift import feature_drift
from edge0_train.measure.overlap import adjacent_overlap
from edge0_train.measure.quality import measure
from edge0_train.measure.survival import survival
from edge0_train.report import table
from edge0_train.run import open_run, read_summary, write_json, write_jsonl, write_text
from edge0_train.stopping import Interrupted
from recipes.paper_claims.arms import ARMS, FULL, QUICK, Arm, Budget, needed, nodes
from recipes.paper_claims.claims import CLAIMS, Rows, judge, spread
from recipes.runs import adapter_of, add_settings, configure_run

COLUMNS = ("loss", "kl", "reverse_kl", "exact_match", "add", "multiply", "reverse", "word", "recall", "repetition")


@dataclass
class Place:
    """Where one seed's runs lie, and its models once they are loaded; `settings` are every run's."""

    out: Path
    seed: int
    budget: Budget
    settings: Sequence[str] = ()
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def directory(self) -> Path:
        """The seed's root; the int4 base lies beside it, since all seeds share it."""
        return self.out / f"seed{self.seed}"

    def configure(self, run: str, phase: str, *overrides: str) -> Config:
        """The configuration of one run; an existing directory is continued."""
        common = (
            f"seed={self.seed}",
            f"root={self.directory}",
            f"base.directory={self.out / 'base'}",
            f"text.rows={self.directory / 'teacher_text'}",
            "threads=1",
        )
        where = self.out if phase == "quantize" else self.directory
        return configure_run(phase, where / run, *common, *overrides, *self.settings)

    @functools.cached_property
    def bench(self) -> Bench:
        """Models and held-out rows."""
        config = self.configure("arms", "evaluate", f"sample.eval_prompts={self.budget.rows}")
        data, _ = text_of(config)
        return open_bench(config, data.held_out[: self.budget.rows])


def main() -> None:
    """Run the arms (none with --report) and print the verdicts; they are written anew after each arm."""
    arguments = _arguments()
    torch.set_num_threads(1)
    budget = QUICK if arguments.quick else FULL
    places = [Place(arguments.out.resolve(), seed, budget, arguments.set) for seed in arguments.seeds]
    if not arguments.report:
        # Arms outside, seeds inside: stopped half-way, the first arms have all their seeds.
        for name in arguments.only or ARMS:
            for place in places:
                run_arm(place, name)
            report(arguments.out)
    print(report(arguments.out))


def run_arm(place: Place, name: str) -> None:
    """Train what the arm rests on, measure it, write `arms/<name>.json`; a run that a gate stops is told and passed over."""
    result = place.directory / "arms" / f"{name}.json"
    if result.exists():
        return
    arm = ARMS[name]
    try:
        if not (place.out / "base").exists():
            run_phase(place.configure("quantize", "quantize"))
        for node in needed(arm, place.budget):
            run_node(place, node)
        metrics = measure_arm(place, arm)
    except Edge0Error as error:
        print(f"seed {place.seed}, {name}: {error}", file=sys.stderr, flush=True)
        return
    result.parent.mkdir(parents=True, exist_ok=True)
    write_json(result, {"seed": place.seed, "arm": name, "what": arm.what, **metrics})
    print(f"seed {place.seed}, {name}: KL {metrics['kl']:.4f}, exact match {metrics['exact_match']:.3f}", flush=True)


def run_node(place: Place, name: str) -> None:
    """One training run, unless it is finished."""
    if name in place.failed:
        raise Edge0Error(f"{name} failed before: {place.failed[name]}")
    if read_summary(place.directory / name):
        return
    node = nodes(place.budget)[name]
    inputs = [
        f"inputs.{kind}={place.directory / parent if parent else ''}"
        for kind, parent in (("prerouter", node.heads), ("lora", node.lora))
    ]
    config = place.configure(name, node.phase, *inputs, *node.overrides)
    try:
        if node.function is None:
            run_phase(config)
        else:
            with open_run(config) as run:
                run.finish(node.function(run.config, run))
    except Edge0Error as error:
        place.failed[name] = str(error)
        raise
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        raise


def measure_arm(place: Place, arm: Arm) -> dict[str, float]:
    """Metrics of one arm, flat."""
    bench = place.bench
    heads, lora = (_adapter(place, kind, node) for kind, node in (("prerouter", arm.heads), ("lora", arm.lora)))
    stage = Stage(
        arm.what,
        native_k=arm.native_k,
        teacher=arm.teacher,
        heads=load_heads(heads, bench.student.path.model.device) if heads else None,
        lora=lora.tensors if lora else None,
        k=arm.k,
        merged=arm.merged,
    )
    metrics = measure(bench, stage)
    if "drift" in arm.extras:
        with running(bench, stage) as path:
            metrics |= feature_drift(path, bench.batches)
    if "survival" in arm.extras:
        metrics |= {f"survival {group}": value for group, value in survival(bench, stage).items()}
    if "overlap" in arm.extras:
        with running(bench, stage) as path:
            for k in (4, 8):
                found = adjacent_overlap(path, bench.batches, k)
                metrics |= {f"overlap k{k}": found["overlap"], f"overlap k{k} by frequency": found["frequency"]}
    summary = read_summary(place.directory / arm.heads) if arm.heads and not arm.lora else None
    trained = summary.get("recall") if summary else None
    if trained:
        baselines = [value for name, value in trained.items() if name not in ("heads", "before")]
        metrics |= {"trained_recall": trained["heads"], "best_baseline": max(baselines)}
    return metrics


def _adapter(place: Place, kind: Any, node: str) -> Adapter | None:
    """The adapter that a node wrote, under the tier that it was trained for; None for an empty name."""
    if not node:
        return None
    config = place.configure(node, "evaluate", *_tier_overrides(place, node))
    return adapter_of(config, kind, place.directory / node)


def _tier_overrides(place: Place, node: str) -> list[str]:
    return [override for override in nodes(place.budget)[node].overrides if override.startswith("tier.")]


# -- results -----------------------------------------------------------------------------------------------------------


def read_results(out: Path) -> dict[int, dict[str, dict[str, Any]]]:
    """{seed: {arm: its metrics}} of all arms that are finished, in the arms' order."""
    results: dict[int, dict[str, dict[str, Any]]] = {}
    for directory in sorted(out.glob("seed*/arms")):
        seed = int(directory.parent.name.removeprefix("seed"))
        found = {arm: directory / f"{arm}.json" for arm in ARMS}
        results[seed] = {arm: json.loads(file.read_text()) for arm, file in found.items() if file.exists()}
    return results


def report(out: Path) -> str:
    """Write table.jsonl, table.txt, claims.txt and claims.png; returns the text."""
    results = read_results(out)
    rows = [row for arms in results.values() for row in arms.values()]
    if not rows:
        return "no arm is finished yet"
    texts = {"table.txt": as_table(results), "claims.txt": "\n".join(_verdicts(list(results.values())))}
    write_jsonl(out / "table.jsonl", rows)
    for name, text in texts.items():
        write_text(out / name, text + "\n")
    plot(results, out / "claims.png")
    return "\n\n".join(texts.values())


def _verdicts(seeds: Sequence[Rows]) -> list[str]:
    verdicts = [judge(claim, seeds) for claim in CLAIMS]
    lines = ["The paper's claims", *(f"  {v.line()}" for v in verdicts if not v.claim.ours)]
    return [*lines, "Ours", *(f"  {v.line()}" for v in verdicts if v.claim.ours)]


def as_table(results: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> str:
    """Mean and spread over seeds, one line an arm."""
    lines = []
    for arm, facts in ARMS.items():
        of_arm = [arms[arm] for arms in results.values() if arm in arms]
        if of_arm:
            cells = [_cell([row[column] for row in of_arm if column in row]) for column in COLUMNS]
            lines.append([arm, facts.what, len(of_arm), *cells])
    extras = [f"{row['arm']} (seed {row['seed']}): {_extras(row)}" for row in _rows(results) if _extras(row)]
    return "\n".join([table(["arm", "what", "seeds", *COLUMNS], lines), "", *extras])


def _rows(results: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    return [arms[arm] for arm in ARMS for arms in results.values() if arm in arms]


def _extras(row: Mapping[str, Any]) -> str:
    known = {*COLUMNS, "seed", "arm", "what", "truncated"}
    return ", ".join(f"{name} {value:.3f}" for name, value in row.items() if name not in known)


def _cell(values: Sequence[float]) -> str | None:
    if not values:
        return None
    mean = sum(values) / len(values)
    return f"{mean:.4f}" + (f" +-{spread(values):.4f}" if len(values) > 1 else "")


def plot(results: Mapping[int, Mapping[str, Mapping[str, Any]]], file: Path) -> None:
    """KL to the teacher (log) and exact match of every arm: bar for the mean, a dot for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    arms = [arm for arm in ARMS if any(arm in found for found in results.values())]
    figure, axes = plt.subplots(1, 2, figsize=(12, 1.5 + 0.27 * len(arms)), sharey=True, layout="constrained")
    # Before there are bars: the teacher's, of length 0, has no place on the scale.
    axes[0].set_xscale("log")
    shown = [found[arm]["kl"] for found in results.values() for arm in found if not ARMS[arm].teacher]
    axes[0].set_xlim(0.7 * min(shown, default=0.1), 1.4 * max(shown, default=1.0))
    for axis, metric, title in zip(axes, ("kl", "exact_match"), ("KL to the teacher", "exact match"), strict=True):
        for height, arm in enumerate(arms):
            values = [found[arm][metric] for found in results.values() if arm in found]
            axis.barh(height, sum(values) / len(values), color="tab:blue", alpha=0.5)
            axis.plot(values, [height] * len(values), "k.", markersize=4)
        axis.set_title(f"{title} (seeds {', '.join(map(str, results))})")
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(arms)), [ARMS[arm].what for arm in arms], fontsize=8)
    axes[0].invert_yaxis()
    figure.savefig(file, dpi=130)
    plt.close(figure)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="N")
    parser.add_argument("--only", nargs="+", choices=list(ARMS), metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--quick", action="store_true", help="a smoke test's budget; use another --out than a real run")
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--out", type=Path, default=Path("runs/paper_claims"))
    add_settings(parser)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except Edge0Error as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
