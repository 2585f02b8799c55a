"""Does on-policy distillation beat as much more SFT where errors compound? The nano pipeline on chains of 30 steps.

    python -m recipes.long_chain.run --seeds 0 1          # about 15 minutes of one CPU core a seed
    python -m recipes.long_chain.run --report             # the table of what is there

Heads, refinement and SFT once a seed; then from the same LoRA and heads two branches with the heads frozen: on-policy
distillation, and SFT for as many steps as fit in the wall time that on-policy took (rollouts and the teacher's scores
included). Results: <out>/seed<N>/result.json and a table. What is finished is not done again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from hydra import compose, initialize_config_dir

from edge0_runtime.contract.artifacts import Kind
from edge0_train.adapters import read_input
from edge0_train.cli import run_phase
from edge0_train.config import Config, config_directory, read_config
from edge0_train.data.rows import read_data
from edge0_train.data.tasks import is_correct
from edge0_train.phases.evaluate import Bench, Stage, load_heads, open_bench, running, token_scores
from edge0_train.report import table
from edge0_train.run import write_json
from edge0_train.student import Sampling, generate

PHASES: dict[str, tuple[str, ...]] = {
    "quantize": (),
    "teacher_text": ("sample.prompts=1024", "sample.eval_prompts=256"),
    "head_distill": ("optim.steps=240", "optim.rows=6", "optim.micro_rows=6"),
    "head_refine": ("optim.steps=160", "optim.rows=6", "optim.micro_rows=6"),
    "student_sft": ("optim.steps=240", "optim.rows=8", "optim.micro_rows=8"),
    "on_policy": ("optim.steps=24", "optim.rows=16", "optim.micro_rows=16", "sample.batch=128"),
}
"""What each phase does here instead of the tier's own settings: fewer rows, since a row is six times as long."""
CONTROL = ("phase=student_sft", "heads.joint_lr=0", "optim.rows=8", "optim.micro_rows=8")
BRANCHES = ("+ on-policy", "+ more SFT")
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
    arguments = _arguments()
    torch.set_num_threads(1)
    with initialize_config_dir(str(config_directory()), version_base=None):
        for seed in [] if arguments.report else arguments.seeds:
            run_seed(arguments.out.resolve() / f"seed{seed}", seed)
    print(report(arguments.out))


def run_seed(root: Path, seed: int) -> None:
    """All phases, the control, the measurement."""
    for phase, overrides in PHASES.items():
        _run(root, seed, phase, f"phase={phase}", *overrides)
    done = {name: json.loads((root / name / "done.json").read_text()) for name in ("student_sft", "on_policy")}
    sft, policy = done["student_sft"], done["on_policy"]
    steps = round(sft["steps"] * policy["seconds"] / sft["seconds"])
    inputs = [f"inputs.{kind}={root / 'student_sft'}" for kind in ("prerouter", "lora")]
    _run(root, seed, "more_sft", *CONTROL, *inputs, f"optim.steps={steps}")
    if not (root / "result.json").exists():
        write_json(root / "result.json", measure_seed(read_config(_compose(root, seed, "phase=evaluate")), root, seed))


def _compose(root: Path, seed: int, *overrides: str) -> Any:
    common = ("tier=nano", "experiment=long_chain", f"seed={seed}", f"root={root}", "logger.wandb=disabled")
    return compose("train", [*common, *overrides])


def _run(root: Path, seed: int, name: str, *overrides: str) -> None:
    """One run, unless it is finished; an interrupted one continues."""
    if (root / name / "done.json").exists():
        return
    resume = f"resume={str((root / name).exists()).lower()}"
    if run_phase(_compose(root, seed, f"run_dir={root / name}", resume, *overrides)) is None:
        sys.exit(f"{name} was stopped; start again to continue")


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure_seed(config: Config, root: Path, seed: int) -> dict[str, Any]:
    """{"seed", "seconds": of each run, "stages": {name: fields of `Result`}}."""
    data, _ = read_data(config.text.rows, config.text.max_length)
    bench = open_bench(config, data.held_out)

    def adapter(run: str, kind: Kind) -> Any:
        found = read_input(config, kind, str(root / run))
        assert found
        return found

    heads = {run: load_heads(bench.student.path, adapter(run, "prerouter")) for run in ("head_refine", "student_sft")}
    tier = config.tier
    stages = [
        Stage(f"teacher, K={tier.base_k}", tier.base_k, teacher=True),
        Stage(f"int4, K={tier.k}", tier.k),
        Stage("heads, refined", heads=heads["head_refine"]),
    ]
    for run, name in (("student_sft", "+ SFT"), *zip(("on_policy", "more_sft"), BRANCHES, strict=True)):
        stages.append(Stage(name, heads=heads["student_sft"], lora=adapter(run, "lora").tensors))
    results = {}
    for stage in stages:
        result = measure(bench, stage)
        print(f"  {stage.name}: KL {result.kl:.4f}, exact match {result.exact_match:.3f}", flush=True)
        results[stage.name] = asdict(result)
    seconds = {name: json.loads((root / name / "done.json").read_text())["seconds"] for name in (*PHASES, "more_sft")}
    return {"seed": seed, "seconds": seconds, "stages": results}


def measure(bench: Bench, stage: Stage) -> Result:
    """Divergence on the teacher's text; greedy answers and their first wrong step."""
    sample, chat = bench.config.sample, bench.student.chat
    right, firsts = "", dict.fromkeys(range(1, 32), 0)
    with running(bench, stage) as path:
        scores = token_scores(path, stage, bench)
        for start in range(0, len(bench.rows), sample.batch):
            part = bench.rows[start : start + sample.batch]
            completions = generate(
                path,
                [row.prompt_ids for row in part],
                Sampling(sample.max_new_tokens),
                end_ids=chat.end_ids,
                pad_id=chat.pad_id,
                native_k=stage.native_k,
            )
            for row, done in zip(part, completions, strict=True):
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
    results = [json.loads(path.read_text()) for path in sorted(out.glob("seed*/result.json"))]
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
    policy, control = ([bit == "1" for r in results for bit in r["stages"][name]["right"]] for name in BRANCHES)
    differences = [float(a) - float(b) for a, b in zip(policy, control, strict=True)]
    mean = sum(differences) / len(differences)
    error = math.sqrt(sum((d - mean) ** 2 for d in differences)) / len(differences)
    return (
        f"{table(columns, rows)}\n+-: standard error of exact match over problems; after it: share of chains whose first wrong"
        f" step is there\n{BRANCHES[0]} minus {BRANCHES[1]}, exact match on the same {len(differences)} problems:"
        f" {mean:+.3f} +- {error:.3f} (the first alone right {differences.count(1.0)} times, the second"
        f" {differences.count(-1.0)} times)"
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
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
