"""Quality against bytes: bias x window x K on nano, each refined, by SFT and on-policy on its own sticky path.

    python -m recipes.sticky.run --seeds 0 1 2                  # all arms; about 5 minutes of one CPU core an arm and seed
    python -m recipes.sticky.run --seeds 0 --arms 4 4:2,2       # K, and behind a colon bias and window
    python -m recipes.sticky.run --report                       # table and plot of what is there

Base, teacher text and first heads are shared: <out>/base, <out>/seed<N>/teacher_text, <out>/seed<N>/k<K>/head_distill. An arm's
runs lie in <out>/seed<N>/<arm>/, its measurements in <out>/seed<N>/<arm>.json. What is finished is not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from edge0_runtime.contract.artifacts import KINDS
from edge0_runtime.contract.errors import Edge0Error
from edge0_train.build import load_heads
from edge0_train.config import Config
from edge0_train.data.rows import text_of
from edge0_train.measure.bench import Bench, Stage, open_bench
from edge0_train.run import write_json
from recipes.long_chain import run as long_chain
from recipes.runs import adapter_of, add_settings, configure_run, run_once
from recipes.sticky.arms import CURVE, Arm
from recipes.sticky.bends import GROW, bent
from recipes.sticky.measure import measure
from recipes.sticky.report import report

SHARED = ("quantize", "teacher_text")
ROWS = 1024
"""Held-out: with nano's 256 the error of a mean KL is half of it."""
MEASURED = ("student_sft", "on_policy")
CHAIN = long_chain.PHASES | {
    "student_sft": (*long_chain.SFT, f"optim.steps={long_chain.SFT_STEPS[-1]}"),
    "on_policy": long_chain.POLICY,
}
"""What each phase does with --chain: answers of 154 tokens, in which errors compound."""


def main() -> None:
    """Run the seeds (none with --report), and print the table over all that lies in --out."""
    arguments = _arguments()
    torch.set_num_threads(1)
    out = (arguments.out or Path("runs/sticky-chain" if arguments.chain else "runs/sticky")).resolve()
    for seed in [] if arguments.report else arguments.seeds:
        of_seed = Seed(out, seed, arguments.rows, arguments.set, chain=arguments.chain)
        of_seed.run([Arm.parse(text) for text in arguments.arms])
    print(report(out))


class Seed:
    """One seed's trainings and measurements; the int4 base is all seeds'."""

    def __init__(self, out: Path, seed: int, rows: int, settings: Sequence[str] = (), *, chain: bool = False) -> None:
        self.out, self.seed, self.rows, self.settings, self.chain = out, seed, rows, tuple(settings), chain
        self.root = out / f"seed{seed}"
        self._benches: dict[str, Bench] = {}

    def run(self, arms: Sequence[Arm]) -> None:
        """Everything of the arms that is not there yet."""
        for phase in SHARED:
            self._once(phase, (self.out if phase == "quantize" else self.root) / phase)
        for arm in arms:
            self.train(arm)
            self.measure(arm)

    def train(self, arm: Arm) -> None:
        """First heads once a K, then the arm's own phases."""
        first = Arm(arm.k)
        heads = self.root / first.name / "head_distill"
        self._once("head_distill", heads, *first.overrides())
        root = self.root / arm.name
        # An arm that only SFT makes another starts from the refined heads of the one it is otherwise like.
        refined = (self.root / replace(arm, bend="").name if arm.sft or arm.bend == GROW else root) / "head_refine"
        with bent(arm.bend):
            self._once("head_refine", refined, *arm.overrides(), f"inputs.prerouter={heads}")
            from_refined = [f"inputs.prerouter={refined}", *arm.sft]
            sft = self._grown(arm, from_refined) if arm.bend == GROW else from_refined
            self._once("student_sft", root / "student_sft", *arm.overrides(), *sft)
            self._once("on_policy", root / "on_policy", *arm.overrides())

    def _grown(self, arm: Arm, start: list[str]) -> list[str]:
        """The first half of an SFT, under half the bias; returns the settings of the second."""
        root, half = self.root / arm.name, replace(arm, bias=arm.bias / 2)
        usual = configure_run("student_sft", root / "student_sft", *self._common("student_sft", root))
        steps = f"optim.steps={usual.optim.steps // 2}"
        self._once("student_sft", root / "half", *half.overrides(), *start, steps)
        return [steps, *(f"inputs.{kind}={root / 'half'}" for kind in KINDS)]

    def measure(self, arm: Arm) -> None:
        """Write <arm>.json: {stage: what `measure` gives}, after SFT and at the end."""
        file, root = self.root / f"{arm.name}.json", self.root / arm.name
        if file.exists():
            return
        config = configure_run("evaluate", root / "evaluate", *self._common("evaluate", root), *arm.overrides())
        with bent(arm.bend):
            bench = replace(self._opened(config, arm.bend), config=config)
        heads = load_heads(adapter_of(config, "prerouter", root / "student_sft"), "cpu")
        found: dict[str, Any] = {}
        for phase in MEASURED:
            lora = adapter_of(config, "lora", root / phase).tensors
            with bent(arm.bend):
                found[phase] = measure(bench, Stage(phase, heads=heads, lora=lora))
            print(f"seed {self.seed}, {arm.name}, {phase}: {json.dumps(found[phase]['mean'])}", flush=True)
        write_json(file, {"seed": self.seed, **vars(arm), "stages": found})

    def _opened(self, config: Config, bend: str) -> Bench:
        """Models and rows; a bend may change the path as it is made."""
        if bend not in self._benches:
            data, _ = text_of(config)
            self._benches[bend] = open_bench(config, data.held_out)
        return self._benches[bend]

    def _once(self, phase: str, directory: Path, *overrides: str) -> None:
        run_once(phase, directory, *self._common(phase, directory.parent), *overrides)

    def _common(self, phase: str, root: Path) -> list[str]:
        """What all runs of a phase have alike."""
        return [
            f"seed={self.seed}",
            f"root={root}",
            f"base.directory={self.out / 'base'}",
            f"text.rows={self.root / 'teacher_text'}",
            f"sample.eval_prompts={self.rows}",
            *(("experiment=long_chain", *CHAIN.get(phase, ())) if self.chain else ()),
            *self.settings,
        ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--arms", nargs="+", default=list(CURVE), metavar="K[:BIAS,WINDOW]")
    parser.add_argument("--rows", type=int, default=ROWS, metavar="N", help="held-out prompts")
    parser.add_argument("--chain", action="store_true", help="on chains of 30 steps instead of short tasks")
    parser.add_argument("--report", action="store_true", help="only the table and the plot")
    parser.add_argument("--out", type=Path, help="default: runs/sticky, with --chain runs/sticky-chain")
    add_settings(parser)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except Edge0Error as error:
        sys.exit(f"error: {error}")
