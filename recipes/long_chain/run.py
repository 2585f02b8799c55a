"""Does on-policy distillation beat as much more SFT where errors compound? The nano pipeline on chains of 30 steps.

    python -m recipes.long_chain.run --seeds 0 1          # about 15 minutes of one CPU core a seed
    python -m recipes.long_chain.run --report             # the table of what is there

Heads and refinement once a seed, then SFT for a few steps (errors are left) and for many (few are). From each of the two
LoRAs, with the heads frozen, two branches: on-policy distillation, and SFT for as many steps as fit in the wall time that
on-policy took, rollouts and the teacher's scores included. Results: <out>/seed<N>/result.json and a table. What is finished is
not done again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from edge0_train.build import load_heads
from edge0_train.config import Config
from edge0_train.data.rows import text_of
from edge0_train.data.tasks import is_correct
from edge0_train.measure.bench import Bench, Stage, open_bench, running
from edge0_train.measure.quality import greedy_answers, token_scores
from edge0_train.report import table
from edge0_train.run import write_json
from edge0_train.student import PrerouterHeads
from recipes.runs import adapter_of, add_settings, configure_run, finished, run_once

PHASES: dict[str, tuple[str, ...]] = {
    "quantize": (),
    "teacher_text": ("sample.prompts=1024", "sample.eval_prompts=256"),
    "head_distill": ("optim.steps=240", "optim.rows=6", "optim.micro_rows=6"),
    "head_refine": ("optim.steps=160", "optim.rows=6", "optim.micro_rows=6"),
}
SFT = ("optim.rows=8", "optim.micro_rows=8")
POLICY = ("optim.steps=24", "optim.rows=16", "optim.micro_rows=16", "sample.batch=128")
"""What each phase does here instead of the tier's own settings: fewer rows, since a row is six times as long."""
SFT_STEPS = (60, 240)
BINS = ((1, 6), (7, 12), (13, 18), (19, 24), (25, 30))
"""Steps of a chain in the table, first and last."""


@dataclass(frozen=True)
class Result:
    """One stage on the held-out chains.

    Attributes:
        loss, kl, reverse_kl: nats per completion token, on the teacher's text.
        exact_match: share of right greedy answers; right: "1" or "0" for each problem, in order.
        first_error: {step: number of chains whose first wrong step it is}; 31: only the answer is wrong.
    """

    loss: float
    kl: float
    reverse_kl: float
    exact_match: float
    right: str
    first_error: dict[int, int]


def main() -> None:
    """Run the seeds (none with --report) and print the table over all that lie in --out."""
    arguments = _arguments()
    torch.set_num_threads(1)
    for seed in [] if arguments.report else arguments.seeds:
        run_seed(arguments.out.resolve() / f"seed{seed}", seed, arguments.set)
    print(report(arguments.out))


def run_seed(root: Path, seed: int, settings: Sequence[str] = ()) -> None:
    """All phases, the controls, the measurement; `settings` are every run's."""
    common = ("experiment=long_chain", f"seed={seed}", f"root={root}", *settings)

    def run(phase: str, name: str, *overrides: str) -> None:
        run_once(phase, root / name, *common, *overrides)

    for phase, overrides in PHASES.items():
        run(phase, phase, *overrides)
    for steps in SFT_STEPS:
        sft, policy, more = names(steps)
        heads = f"inputs.prerouter={root / 'head_refine'}"
        run("student_sft", sft, *SFT, heads, "inputs.lora=", f"optim.steps={steps}")
        inputs = [f"inputs.{kind}={root / sft}" for kind in ("prerouter", "lora")]
        run("on_policy", policy, *POLICY, *inputs)
        same_time = round(steps * finished(root / policy)["seconds"] / finished(root / sft)["seconds"])
        run("student_sft", more, *SFT, *inputs, "heads.joint_lr=0", f"optim.steps={same_time}")
    measure_seed(configure_run("evaluate", root / "evaluate", *common), root, seed)


def names(steps: int) -> tuple[str, str, str]:
    """Runs of one length of SFT: itself, and the two branches."""
    return f"sft_{steps}", f"sft_{steps}_on_policy", f"sft_{steps}_more_sft"


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure_seed(config: Config, root: Path, seed: int) -> None:
    """Write result.json: {"seed", "seconds" and "steps" of each run, "stages": {name: fields of `Result`}}."""
    runs = [run for steps in SFT_STEPS for run in names(steps)]
    file = root / "result.json"
    stages = json.loads(file.read_text())["stages"] if file.exists() else {}
    data, _ = text_of(config)
    bench = open_bench(config, data.held_out)

    def heads(run: str) -> PrerouterHeads:
        return load_heads(adapter_of(config, "prerouter", root / run), bench.student.path.model.device)

    tier = config.tier
    wanted = [
        Stage(f"teacher, K={tier.base_k}", tier.base_k, teacher=True),
        Stage(f"int4, K={tier.k}", tier.k),
        Stage("refined heads", heads=heads("head_refine")),
    ]
    for steps in SFT_STEPS:
        trained = heads(names(steps)[0])
        wanted += [Stage(n, heads=trained, lora=adapter_of(config, "lora", root / n).tensors) for n in names(steps)]
    for stage in wanted:
        if stage.name in stages:
            continue
        result = measure(bench, stage)
        print(f"  {stage.name}: KL {result.kl:.4f}, exact match {result.exact_match:.3f}", flush=True)
        stages[stage.name] = asdict(result)
        done = {run: finished(root / run) for run in (*PHASES, *runs)}
        told = {key: {run: d[key] for run, d in done.items() if key in d} for key in ("seconds", "steps")}
        write_json(file, {"seed": seed, **told, "stages": stages})


def measure(bench: Bench, stage: Stage) -> Result:
    """Divergence on the teacher's text; greedy answers and their first wrong step."""
    chat = bench.student.chat
    right, firsts = "", dict.fromkeys(range(1, 32), 0)
    with running(bench, stage) as path:
        scores = token_scores(path, stage, bench)
        for row, done in zip(bench.rows, greedy_answers(path, stage, bench, bench.rows), strict=True):
            text = chat.text(done.ids)
            right += str(int(is_correct(row.answer, text)))
            step = first_error(chat.text(row.prompt_ids), text)
            if step:
                firsts[step] += 1
    return Result(scores["loss"], scores["kl"], scores["reverse_kl"], right.count("1") / len(right), right, firsts)


def first_error(prompt: str, completion: str) -> int | None:
    """The first step (from 1) that is not what the prompt's chain gives; after right steps, the answer counts as one more.

    None: all of it is right. Raises ValueError when the prompt holds no chain.
    """
    match = re.search(r"Run:((?:[a-zA-Z]\d)+)\.", prompt)
    if not match:
        raise ValueError(f"prompt {prompt!r} is not a chain; evaluate on text.prompts=tasks:chain")
    have, rest = 0, completion
    changes = re.findall(r"[a-zA-Z]\d", match[1])
    for step, change in enumerate(changes, 1):
        have = (have + int(change[1:])) % 100
        expected = f"{change}={have:02d}"
        if not rest.startswith(expected):
            return step
        rest = rest[len(expected) :]
    return None if is_correct(f"{have:02d}", rest) else len(changes) + 1


# -- reporting ---------------------------------------------------------------------------------------------------------


def report(out: Path) -> str:
    """A table of all seeds that are there, and the mean over them."""
    results = [json.loads(file.read_text()) for file in sorted(out.glob("seed*/result.json"))]
    if not results:
        return f"{out}: no results yet"
    columns = [
        "stage",
        "seed",
        "loss",
        "KL",
        "reverse KL",
        "exact match",
        "+-",
        *(f"{a}..{b}" for a, b in BINS),
        "answer",
    ]
    rows: list[list[Any]] = []
    for name in results[0]["stages"]:
        each = [_cells([result["stages"][name]]) for result in results]
        rows += [[name, result["seed"], *cells] for result, cells in zip(results, each, strict=True)]
        if len(each) > 1:
            rows.append([name, "all", *_cells([result["stages"][name] for result in results])])
    notes = [
        "+-: standard error of exact match over problems; after it: share of chains whose first wrong step is there"
    ]
    notes += [_difference(results, *names(steps)[1:]) for steps in SFT_STEPS]
    return "\n".join([table(columns, rows), *notes])


def _difference(results: Sequence[Mapping[str, Any]], first: str, second: str) -> str:
    """One line on two stages that answered the same problems."""
    of_first, of_second = (
        [int(bit) for r in results for bit in r["stages"][name]["right"]] for name in (first, second)
    )
    differences = [a - b for a, b in zip(of_first, of_second, strict=True)]
    mean = sum(differences) / len(differences)
    error = math.sqrt(sum((d - mean) ** 2 for d in differences)) / len(differences)
    return (
        f"{first} minus {second}, exact match on the same {len(differences)} problems: {mean:+.3f} +- {error:.3f}"
        f" (only the first is right {differences.count(1)} times, only the second {differences.count(-1)} times)"
    )


def _cells(stages: Sequence[Mapping[str, Any]]) -> list[float]:
    """Means over seeds, which have the same number of problems each."""
    right = "".join(stage["right"] for stage in stages)
    share, count = right.count("1") / len(right), len(right)
    scores = [sum(stage[key] for stage in stages) / len(stages) for key in ("loss", "kl", "reverse_kl")]
    firsts = [
        sum(stage["first_error"][str(step)] for stage in stages for step in range(first, last + 1)) / count
        for first, last in (*BINS, (31, 31))
    ]
    return [*scores, share, math.sqrt(share * (1 - share) / count), *firsts]


def _arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path, default=Path("runs/long_chain"))
    parser.add_argument("--report", action="store_true", help="no training: the table of what is there")
    add_settings(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
