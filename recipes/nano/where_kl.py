"""Where the held-out KL of a finished nano training sits: in which rows, and in how few tokens.

    python -m recipes.nano.where_kl runs/nano-seed0 runs/nano-paper-seed0

Prints, for int4 at the served K and for every stage with a LoRA: the mean KL(teacher || stage) a token and its standard
error over rows, the share that the ten worst tokens hold, the same mean over rows in which the teacher's own (sampled) text
ends in the right answer and over the others, and the quantiles.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from edge0_train.config import Config, configure
from edge0_train.data.rows import text_of
from edge0_train.data.tasks import is_correct
from edge0_train.measure.bench import Bench, Stage, open_bench, running
from edge0_train.measure.quality import mean_and_error, row_kl
from edge0_train.measure.stages import chain_adapters, chain_stages
from edge0_train.report import table

QUANTILES = (0.5, 0.9, 0.99)


def stages(config: Config, bench: Bench) -> list[Stage]:
    """int4 at the served K, then the stages of `config.chain` that have a LoRA."""
    trained = chain_stages(bench, chain_adapters(config))
    return [Stage(f"int4, K={config.tier.k}", config.tier.k), *(stage for stage in trained if stage.lora is not None)]


def facts(bench: Bench, stage: Stage) -> dict[str, Any]:
    """One line of the table."""
    with running(bench, stage) as path:
        rows = row_kl(path, stage, bench)
    every_N = torch.cat(rows).sort(descending=True).values
    sums_R, counts_R = torch.stack([row.sum() for row in rows]), torch.tensor([len(row) for row in rows])
    mean, error = mean_and_error(sums_R, counts_R)
    right_R = torch.tensor(
        [is_correct(row.answer, bench.student.chat.text(row.completion_ids)) for row in bench.rows if row.answer]
    )

    def mean_of(chosen_R: torch.Tensor) -> float:
        return float(sums_R[chosen_R].sum() / counts_R[chosen_R].sum())

    return {
        "stage": stage.name,
        "KL": mean,
        "+-": error,
        "10 tokens": float(every_N[:10].sum() / every_N.sum()),
        "rows right": mean_of(right_R),
        "rows wrong": mean_of(~right_R),
        "wrong's tokens": float(counts_R[~right_R].sum() / counts_R.sum()),
        "wrong's KL": float(sums_R[~right_R].sum() / sums_R.sum()),
    } | {f"q{quantile}": float(every_N.quantile(quantile)) for quantile in QUANTILES}


def main() -> None:
    """Print one table a root: a line for each stage of its training."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("roots", type=Path, nargs="+", help="directories of finished trainings")
    parser.add_argument("--set", nargs="*", default=[], help="settings, e.g. experiment=long_chain")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for root in arguments.roots:
        config = configure("phase=evaluate", "tier=nano", f"root={root}", *arguments.set)
        data, _ = text_of(config)
        bench = open_bench(config, data.held_out)
        lines = [facts(bench, stage) for stage in stages(config, bench)]
        print(f"{root}, {len(bench.rows)} rows\n" + table(list(lines[0]), [list(line.values()) for line in lines]))


if __name__ == "__main__":
    main()
