"""A two-layer regression for the optimizer loop: rows, objective, run directory, and what a run leaves behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from edge0_train.checkpoint import checkpoints
from edge0_train.config import Logger, Optim
from edge0_train.loop import Backward, Objective
from edge0_train.run import Run

OPTIM = Optim(
    steps=6, rows=8, micro_rows=3, lr=1e-2, weight_decay=0.01, warmup=2, schedule="cosine", clip=1.0, patience=0
)
ROWS = 8
LENGTHS = [3, 1, 7, 2, 5, 1, 4, 6]
"""Valid tokens of the window's rows: unequal on purpose."""


@dataclass(frozen=True)
class Micro:
    """Flat tokens of some rows."""

    x_ND: torch.Tensor
    y_N: torch.Tensor

    @property
    def valid(self) -> int:
        return len(self.y_N)

    @property
    def tokens(self) -> int:
        return 2 * len(self.y_N)


def data(step: int) -> list[Micro]:
    """The step's rows, one Micro each: a function of the step alone."""
    random = torch.Generator().manual_seed(1000 + step)
    return [Micro(torch.randn(n, 4, generator=random), torch.randn(n, generator=random)) for n in LENGTHS]


def cut(rows: list[Micro], size: int) -> list[Micro]:
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [Micro(torch.cat([r.x_ND for r in part]), torch.cat([r.y_N for r in part])) for part in parts]


class Toy:
    """Two-layer regression. `calls` counts loss calls; `on_call` runs inside each of them."""

    def __init__(self, micro_rows: int = 3, on_call: Callable[[int], None] = lambda n: None):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        self.micro_rows, self.on_call, self.calls = micro_rows, on_call, 0

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.model.named_parameters())

    def loss(self, micro: Micro, backward: Backward) -> dict[str, float]:
        self.calls += 1
        self.on_call(self.calls)
        error_N = self.model(micro.x_ND)[:, 0] - micro.y_N
        backward((error_N**2).sum())
        return {"absolute": float(error_N.detach().abs().sum())}

    def objective(self, **changes: Any) -> Objective:
        objective = Objective(self.parameters, lambda step: cut(data(step), self.micro_rows), self.loss)
        return replace(objective, **changes)

    def values(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.parameters.values()]


def run_in(directory: Path, *, resume: bool = False, every: int = 1, checkpoint_every: int = 100) -> Run:
    """A run directory as the loop knows it."""
    directory.mkdir(exist_ok=True)
    logger = Logger(wandb="disabled", project="test", every=every, checkpoint_every=checkpoint_every)
    return Run(directory, SimpleNamespace(resume=resume, phase="toy", logger=logger))  # type: ignore[arg-type]


def metrics(run: Run) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl without the one number that depends on the clock."""
    lines = (run.directory / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_second"} for line in lines]


def newest(directory: Path) -> dict[str, torch.Tensor]:
    """Everything in the newest checkpoint: values, moments, step counters."""
    return load_file(str(checkpoints(directory / "checkpoints")[-1]))


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
