"""phase=quantize: the int4 deployment checkpoint from a transformers directory.

    python -m edge0_train phase=quantize tier=nano
    python -m edge0_train phase=quantize tier=35b base.source=models/Qwen3.6-35B-A3B

Settings: base.source (the transformers directory), base.directory (where the checkpoint goes), base.names (mlx-lm's names, or the
published ones, which the public runtime reads: the default of the tiers 35b and 8b).
Expected on nano (0.1 s): the base of all later phases; its fingerprint binds every adapter to it. At K=8 it has KL .0059 to the
teacher, at K=4 .0076.
"""

from __future__ import annotations

import glob
import shutil
from pathlib import Path
from typing import Any, cast

from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.family import Names
from edge0_runtime.contract.files import read_json
from edge0_runtime.contract.tier import Tier
from edge0_train.base import quantize_checkpoint
from edge0_train.config import Config
from edge0_train.data.counts import Rows
from edge0_train.plan import memory_plan
from edge0_train.report import print_plan
from edge0_train.run import Run


def quantize(config: Config, run: Run) -> dict[str, Any]:
    """Write `base.directory` from `base.source`: the values of mlx-lm's own conversion bit for bit, under either names."""
    source, target = Path(config.base.source), Path(config.base.directory)
    config_file = source / "config.json"
    if not config_file.is_file():
        raise Edge0Error(
            f"base.source: {source} has no config.json; give the transformers directory of the original model"
        )
    model_type = read_json(config_file, "download it again").get("model_type")
    facts = {"source": f"{source} ({model_type})", "target": f"{target} ({config.base.names} names)"}
    print_plan(config, facts | memory_plan(config, Rows.unwritten(config)))
    if config.dry_run:
        return {}
    names = cast(Names, config.base.names)
    if not config.resume:
        return quantize_checkpoint(source, target, config.tier, names=names)
    for partial in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):  # of a process that was killed
        shutil.rmtree(partial)
    make = _compared if target.exists() else quantize_checkpoint
    return make(source, target, config.tier, names=names)


def _compared(source: Path, target: Path, tier: Tier, names: Names) -> dict[str, Any]:
    """A run may be killed after its base has appeared and before its done.json: is `target` what `source` makes?"""
    again = target.with_name(f".{target.name}.again.tmp")
    try:
        summary = quantize_checkpoint(source, again, tier, names=names)
        if Checkpoint.open(again).fingerprint() != Checkpoint.open(target).fingerprint():
            raise Edge0Error(
                f"base.directory: {target} exists and is not what {source} makes; delete it or name another one"
            )
        return summary
    finally:
        shutil.rmtree(again, ignore_errors=True)
