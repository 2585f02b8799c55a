"""Train the teacher of tier nano (Qwen3.5-MoE, 3.4 M parameters) or nano-ling (Ling 3) from scratch, on generated chat tasks.

    OMP_WAIT_POLICY=PASSIVE python -m recipes.nano.train_teacher --tier nano-ling

Trains in stages, scores exact match on held-out prompts (greedy, KV cache), and writes a directory that both transformers and
mlx-lm load, with its model card. Each stage leaves a directory `stage<n>` in --work; `--start 1` runs the stages after
the first one only.
"""

import argparse
import json
from pathlib import Path

import torch
import transformers

from edge0_runtime.contract.tier import builtin_tier
from edge0_train.config import asset
from edge0_train.data.tasks import SHORT_TASKS, problems
from recipes.nano.teacher.card import model_card
from recipes.nano.teacher.checkpoint import build_model, load_checked, mlx_difference, save
from recipes.nano.teacher.evaluation import evaluate
from recipes.nano.teacher.rows import build_tokenizer, check_tokenizer
from recipes.nano.teacher.training import Stage, train

EVAL_SEED, EVAL_COUNT, EVAL_CHAINS = 10_000, 512, 256
STAGES = {
    "nano": (
        Stage(1400, {SHORT_TASKS: 32}),
        Stage(650, {SHORT_TASKS: 20, ("chain",): 8}, rate=0.5),
        Stage(250, {SHORT_TASKS: 32, ("chain",): 2}, rate=0.25),
    ),
    "nano-ling": (Stage(1100, {SHORT_TASKS: 32}),),
}
"""The short tasks; chains, at a rate that costs the short tasks some of their accuracy; and that accuracy again."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Arguments, of the process unless `argv` is given; an unknown tier exits with code 2."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tier", choices=STAGES, default="nano", help="whose teacher")
    parser.add_argument("--work", type=Path, help="for what the stages leave (runs/<tier>-teacher)")
    parser.add_argument("--start", type=int, default=0, help="go on after this stage, which lies in --work already")
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights, tokenizer and data (stage n draws with seed + n - 1)"
    )
    parser.add_argument("--out", type=Path, help="directory to write (the tier's embedded one)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """All stages, the checks of the saved directory, the scores and the model card; AssertionError if a check fails."""
    args = parse_args(argv)
    tier, stages = builtin_tier(args.tier), STAGES[args.tier]
    work, out = args.work or Path(f"runs/{tier.name}-teacher"), args.out or Path(asset(f"{tier.name}-teacher"))
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()  # not the notes on missing GPU kernels
    transformers.logging.disable_progress_bar()
    tokenizer = build_tokenizer(args.seed)
    places = [work / f"stage{number}" for number in range(len(stages) + 1)]
    model = load_checked(places[args.start]) if args.start else build_model(tier, args.seed)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {2 * parameters / 1e6:.1f} MB in bf16")
    print(f"seed {args.seed}, {args.threads} thread(s), writes {out}", flush=True)

    costs = [json.loads((place / "cost.json").read_text()) for place in places[1 : args.start + 1]]
    for number, stage in enumerate(stages[args.start :], args.start + 1):
        print(f"stage {number}: {stage.steps} steps of {stage} rows", flush=True)
        costs.append(train(tier, model, tokenizer, stage, args.seed + number - 1))
        save(tier, model, tokenizer, places[number])
        (places[number] / "cost.json").write_text(json.dumps(costs[-1]) + "\n")
        model = load_checked(places[number])
    save(tier, model, tokenizer, out)
    short, long = problems("eval", EVAL_SEED, EVAL_COUNT), problems("eval", EVAL_SEED, EVAL_CHAINS, ["chain"])
    check_tokenizer(tokenizer, out, short)
    scores = evaluate(model, tokenizer, short)
    if any("chain" in stage.tasks for stage in stages):
        scores = scores | {"short": scores.pop("all")} | {"chain": evaluate(model, tokenizer, long)["chain"]}
    difference = mlx_difference(model, tokenizer, out, EVAL_SEED)
    if difference is not None and difference > 1e-5:
        raise AssertionError(f"mlx-lm's logits differ by relative L2 {difference:.1e}; want at most 1e-5.")
    card = model_card(
        tier, stages, costs, scores,
        parameters=parameters, difference=difference, seed=args.seed, eval_seed=EVAL_SEED, threads=args.threads,
    )  # fmt: skip
    (out / "README.md").write_text(card)
    for task, (right, count) in scores.items():
        print(f"exact match {task}: {right / count:.3f} ({right}/{count})")
    wall, cpu = (sum(cost[unit] for cost in costs) for unit in ("wall_s", "cpu_s"))
    print(f"training took {wall:.0f} s wall, {cpu:.0f} s CPU")
    print(f"relative L2 of mlx-lm's logits: {difference}")


if __name__ == "__main__":
    main()
