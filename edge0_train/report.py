"""What a run says: the plan before step 1, and the tables at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from accelerate import PartialState
from tqdm import tqdm

from edge0_train.config import Config


def print_plan(config: Config, facts: Mapping[str, Any]) -> None:
    """Print what is about to happen, before anything does; a value may have several lines."""
    tier, sticky = config.tier, config.tier.router.sticky
    head = {
        "phase": f"{config.phase}, tier {tier.name}, seed {config.seed}",
        "base": f"{config.base.directory} ({config.base.dtype} on {config.base.device})",
        "routing": f"K={tier.k} of {tier.num_experts} (base K={tier.base_k}), {tier.router.kind}, layers"
        f" {tier.consumers[0]}..{tier.consumers[-1]} predicted"
        + (f", sticky (bias {sticky.bias:g}, window {sticky.window})" if sticky else ""),
        "teacher": f"{config.teacher.directory or 'not set'}, native at K={tier.base_k}",
        "run": f"{config.run_dir} (all settings: its config.yaml)",
    }
    rows = {**head, **facts}
    width = max(len(name) for name in rows)
    for name, value in rows.items():
        first, *more = str(value).splitlines() or [""]
        print(f"  {name:<{width}}  {first}", *(f"  {'':<{width}}  {line}" for line in more), sep="\n", flush=True)


def progress(steps: Iterable[Any], description: str, **options: Any) -> tqdm:
    """A progress bar on rank 0's stderr: live on a terminal, a line now and then in a log."""
    interval = 0.1 if sys.stderr.isatty() else 20.0
    quiet = not PartialState().is_main_process
    return tqdm(steps, desc=description, mininterval=interval, maxinterval=interval, disable=quiet, **options)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Plain text table; floats with four significant digits, None as a dash."""
    cells = [list(columns), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
