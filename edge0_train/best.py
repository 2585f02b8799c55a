"""Early stopping: which evaluation was the best, and its values on disk until the end.

The count is a function of metrics.jsonl, so that a resumed run decides as an uninterrupted one. Files are
`checkpoints/best-<step>.safetensors`; one goes when no checkpoint that is kept goes back to where it was the best.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from safetensors.torch import load_file, save
from torch import nn

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import atomic_replace


@dataclass(frozen=True)
class Best:
    """The best evaluation so far (the first of equals), and how many after it were no better."""

    step: int = 0
    value: float = math.inf
    since: int = 0

    def after(self, step: int, value: float) -> Best:
        """With one more evaluation; NaN is never better."""
        return Best(step, value) if value < self.value else Best(self.step, self.value, self.since + 1)

    @classmethod
    def of(cls, evaluations: Iterable[tuple[int, float]]) -> Best:
        """What a run's evaluations (step, value), in the order of steps, lead to."""
        best = cls()
        for step, value in evaluations:
            best = best.after(step, value)
        return best


class EarlyStop:
    """Watches one metric of a run, the smaller the better.

    Args:
        patience: evaluations without improvement after which to stop.
        rows: the metric rows of the steps before, with their `step`.
    """

    def __init__(
        self,
        directory: Path,
        metric: str,
        patience: int,
        trainable: Mapping[str, nn.Parameter],
        rows: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        self.directory, self.metric, self.patience, self.trainable = directory, metric, patience, trainable
        # JSON has no NaN: it is null.
        self.evaluations = [
            (row["step"], math.nan if row[metric] is None else row[metric]) for row in rows if metric in row
        ]

    @property
    def best(self) -> Best:
        """What all evaluations so far lead to."""
        return Best.of(self.evaluations)

    @property
    def exhausted(self) -> bool:
        """Whether `patience` evaluations in a row were no better: training is to end."""
        return self.best.since >= self.patience

    def see(self, step: int, value: float) -> None:
        """One more evaluation, rank 0's; a better one puts its values on the disk."""
        value = broadcast_object_list([value])[0]
        self.evaluations.append((step, value))
        if self.best.step == step and PartialState().is_main_process:
            self.directory.mkdir(parents=True, exist_ok=True)
            values = {name: p.detach().cpu().contiguous() for name, p in self.trainable.items()}
            with atomic_replace(self._file(step)) as temporary:
                temporary.write_bytes(save(values, {"step": str(step)}))

    def forget_others(self, checkpoints: Iterable[int]) -> None:
        """Keep what was the best at one of the steps that a resume may go back to, and remove the rest."""
        needed = {self._file(Best.of(one for one in self.evaluations if one[0] <= step).step) for step in checkpoints}
        for file in {*self.directory.glob("best-*.safetensors")} - needed:
            file.unlink()

    @torch.no_grad()
    def restore(self) -> None:
        """Put the best values into the parameters. Raises Edge0Error when their file is gone or damaged."""
        file = self._file(self.best.step)
        try:
            values = load_file(str(file))
            for name, parameter in self.trainable.items():
                parameter.copy_(values[name])
        except Exception as error:  # the library's errors have no common type
            raise Edge0Error(
                f"{file}: the best values cannot be read ({error}); train again in another run_dir"
            ) from error

    def _file(self, step: int) -> Path:
        return self.directory / f"best-{step:08d}.safetensors"
