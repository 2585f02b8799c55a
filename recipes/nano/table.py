"""Ours and the paper's recipe side by side, stage by stage: each seed and the mean over seeds.

python -m recipes.nano.table runs                                    # what recipes/nano/run.sh has made there
python -m recipes.nano.table runs --json recipes/nano/results/x.json # and the same as data
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.data.tasks import TASKS
from edge0_train.report import table
from edge0_train.run import write_json
from recipes.runs import finished

RECIPES = {"ours": "nano-seed", "paper": "nano-paper-seed"}
"""Recipe -> its run directories, without the seed."""
COLUMNS = {"loss": "loss", "kl": "KL", "recall": "recall", "exact_match": "exact match"}


def read_results(directory: Path) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """{recipe: {seed: rows of its evaluate table}} of the seeds that have both recipes. Raises Edge0Error when none has."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for recipe, prefix in RECIPES.items():
        for file in directory.glob(f"{prefix}*/evaluate/done.json"):
            seed = re.fullmatch(prefix + r"(\d+)", file.parts[-3])
            if seed:
                found.setdefault(recipe, {})[int(seed[1])] = finished(file.parent)["table"]
    seeds = sorted(set.intersection(*(set(found.get(recipe, {})) for recipe in RECIPES)))
    if not seeds:
        raise Edge0Error(f"{directory}: no seed has both recipes; run recipes/nano/run.sh first")
    return {recipe: {seed: found[recipe][seed] for seed in seeds} for recipe in RECIPES}


def mean_rows(tables: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The mean of every number of every stage; stages in the order of the first table."""
    return [
        {"stage": row["stage"]}
        | {
            key: sum(of_stage[key] for of_stage in same) / len(same)
            for key in row
            if key != "stage" and all(key in of_stage for of_stage in same)
        }
        for row in tables[0]
        for same in [[r for rows in tables for r in rows if r["stage"] == row["stage"]]]
    ]


def show(results: dict[str, dict[int, list[dict[str, Any]]]]) -> str:
    """One block a seed and one of means; the stages of both recipes below each other."""
    seeds = list(results["ours"])
    blocks = {f"seed {seed}": {recipe: results[recipe][seed] for recipe in RECIPES} for seed in seeds}
    if len(seeds) > 1:
        blocks[f"mean of seeds {', '.join(map(str, seeds))}"] = {
            recipe: mean_rows(list(results[recipe].values())) for recipe in RECIPES
        }
    texts = []
    for title, sides in blocks.items():
        names = {row["stage"] for row in sides["paper"]}
        tasks = [task for task in TASKS if task in sides["ours"][0]]
        columns = COLUMNS | {task: task for task in tasks}
        rows = []
        for row in sides["ours"]:
            if row["stage"] in names and row["stage"].startswith("+"):
                paper = next(r for r in sides["paper"] if r["stage"] == row["stage"])
                both = {"ours": row, "paper": paper}
                rows += [[f"{r['stage']}, {recipe}", *map(r.get, columns)] for recipe, r in both.items()]
            else:
                rows.append([row["stage"], *map(row.get, columns)])
        texts.append(f"{title}\n" + table(["stage", *columns.values()], rows))
    return "\n\n".join(texts)


def main() -> None:
    """Print the tables of the runs that are there; with --json also write their rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path, help="the directory that run.sh wrote to")
    parser.add_argument("--json", type=Path, help="write the seeds' and the mean rows there")
    arguments = parser.parse_args()
    results = read_results(arguments.runs)
    print(show(results))
    if arguments.json:
        means = {recipe: mean_rows(list(seeds.values())) for recipe, seeds in results.items()}
        write_json(arguments.json, {"seeds": results, "mean": means})


if __name__ == "__main__":
    main()
