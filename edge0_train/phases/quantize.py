"""phase=quantize: the int4 deployment checkpoint from a transformers directory.

    python -m edge0_train phase=quantize tier=nano
    python -m edge0_train phase=quantize tier=35b base.source=models/Qwen3.6-35B-A3B

Settings: base.source (the transformers directory), base.directory (where the checkpoint goes).
Expected on nano (0.1 s): the base of all later phases; its fingerprint binds every adapter to it. At K=8 it has KL .0059 to the
teacher, at K=4 .0076.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.base import quantize_checkpoint
from edge0_train.config import Config
from edge0_train.data.counts import Rows
from edge0_train.plan import memory_plan
from edge0_train.report import print_plan
from edge0_train.run import Run


def quantize(config: Config, run: Run) -> dict[str, Any]:
    """Write `base.directory` from `base.source`: bit for bit what mlx-lm's own conversion writes."""
    source, target = Path(config.base.source), Path(config.base.directory)
    config_file = source / "config.json"
    if not config_file.is_file():
        raise Edge0Error(
            f"base.source: {source} has no config.json; give the transformers directory of the original model"
        )
    model_type = json.loads(config_file.read_text(encoding="utf-8")).get("model_type")
    print_plan(
        config,
        {"source": f"{source} ({model_type})", "target": str(target), **memory_plan(config, Rows.unwritten(config))},
    )
    if config.dry_run:
        return {}
    return quantize_checkpoint(source, target, config.tier)
