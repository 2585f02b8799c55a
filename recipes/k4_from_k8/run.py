"""From a base that routes 8 experts to tiers that serve 8, 4 or 2: quality and speed by K, on nano.

    python -m recipes.k4_from_k8.run                              # four arms, about 8 minutes of one CPU core
    python -m recipes.k4_from_k8.run --steps 0.02 --rows 8        # a smoke test
    python -m recipes.k4_from_k8.run --arms 8 4 2 4/16 --out runs/k4_from_k8

An arm is K, or K/M for weights divided by the mass of the M likeliest experts (`tier.router.mass_k`). All share one int4 base and
one teacher text; each trains its own heads and LoRA, and its two files beside the base are the tier. Finished phases are not
done again. Written are table.jsonl and table.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads
os.environ.setdefault("HF_HUB_OFFLINE", "1")


from edge0_runtime.contract.errors import Edge0Error
from edge0_train.report import table
from edge0_train.run import write_jsonl, write_text
from recipes.runs import add_settings, finished, run_once

STEPS = {"head_distill": 400, "student_sft": 120}
SHARED = ("quantize", "teacher_text")
PHASES = ("head_distill", "student_sft", "evaluate", "export")


@dataclass(frozen=True)
class Arm:
    """A served K, and the mass its weights are divided by (0: that of the K chosen)."""

    k: int
    mass_k: int

    @classmethod
    def parse(cls, text: str) -> Arm:
        """`4` or `4/8`: K, and after a slash the mass."""
        k, _, mass = text.partition("/")
        return cls(int(k), int(mass or 0))

    @property
    def name(self) -> str:
        """The arm's directory below --out."""
        return f"k{self.k}" + f"-mass{self.mass_k}" * bool(self.mass_k)

    def overrides(self) -> list[str]:
        """What the arm changes in its tier, as on the command line."""
        return [f"tier.k={self.k}", f"+tier.router.mass_k={self.mass_k}"]


def main() -> None:
    """Train and measure every arm, and print the table; it is written anew after each arm."""
    arguments = _arguments()
    out = arguments.out.resolve()
    rows = []
    for phase in SHARED:
        run(out, out, phase, [], arguments)
    for arm in map(Arm.parse, arguments.arms):
        for phase in PHASES:
            run(out, out / arm.name, phase, arm.overrides(), arguments)
        rows.append(row(out / arm.name, arm))
        report(out, rows)
    print(report(out, rows))


def run(out: Path, root: Path, phase: str, overrides: list[str], arguments: argparse.Namespace) -> None:
    """One phase below `root`, with base and teacher text of `out`, unless it is done."""
    steps = [f"optim.steps={max(2, round(STEPS[phase] * arguments.steps))}"] if phase in STEPS else []
    common = [
        f"seed={arguments.seed}", f"root={root}", f"base.directory={out / 'base'}", f"text.rows={out / 'teacher_text'}",
        "chain=[quantize,teacher_text,head_distill,student_sft,evaluate,export]",
    ]  # fmt: skip
    if arguments.rows:
        common += [f"sample.eval_prompts={arguments.rows}"]
        common += [f"sample.prompts={16 * arguments.rows}"] * (phase == "teacher_text")
    run_once(phase, root / phase, *common, *steps, *overrides, *arguments.set)


def row(root: Path, arm: Arm) -> dict[str, Any]:
    """What evaluate found before and after training, and what the served tier costs a token."""
    stages = {stage["stage"]: stage for stage in finished(root / "evaluate")["table"]}
    before, after = stages[f"int4, K={arm.k}"], stages["+ SFT"]
    command = [sys.executable, "-m", "edge0_runtime", "bench", str(root / "model"), "--json"]
    lines = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.splitlines()
    served = [json.loads(line) for line in lines]
    return {
        "arm": arm.name,
        "k": arm.k,
        "mass_k": arm.mass_k,
        **{f"{name} {when}": stage.get(name) for name in ("kl", "exact_match") for when, stage in _when(before, after)},
        "recall": after.get("recall"),
        "decode_tokens_per_second": statistics.median(line["decode_tokens_per_second"] for line in served),
    }


def _when(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [("own gates", before), ("trained", after)]


def report(out: Path, rows: list[dict[str, Any]]) -> str:
    """Write the table; returns it."""
    text = table(list(rows[0]), [list(line.values()) for line in rows])
    write_jsonl(out / "table.jsonl", rows)
    write_text(out / "table.txt", text + "\n")
    return text


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=["8", "4", "2", "4/16"], metavar="K[/M]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=float, default=1.0, metavar="FACTOR", help=f"on {STEPS}")
    parser.add_argument("--rows", type=int, default=0, metavar="N", help="held-out prompts, and 16 N to train on")
    parser.add_argument("--out", type=Path, default=Path("runs/k4_from_k8"))
    add_settings(parser)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except Edge0Error as error:
        sys.exit(f"error: {error}")
