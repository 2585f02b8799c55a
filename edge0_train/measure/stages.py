"""The stages of one training: what each phase of `chain` has made of the student, from the files below `root`."""

from __future__ import annotations

from pathlib import Path

from edge0_runtime.contract.artifacts import KINDS, Adapter, Kind
from edge0_train.adapters import check_together, read_input
from edge0_train.build import load_heads
from edge0_train.config import STAGE_NAMES, Config
from edge0_train.measure.bench import Bench, Stage
from edge0_train.student import PrerouterHeads


def chain_adapters(config: Config) -> list[tuple[str, Kind, Adapter]]:
    """(phase, kind, file) of every adapter that the chain has written, in order; a phase's heads before its LoRA."""
    found: list[tuple[str, Kind, Adapter]] = []
    for phase in config.chain:
        for kind in KINDS:
            file = Path(config.root) / phase / config.tier.file_name(kind)
            adapter = read_input(config, kind, str(file)) if file.is_file() else None
            if adapter:
                found.append((phase, kind, adapter))
    return found


def chain_stages(
    bench: Bench, adapters: list[tuple[str, Kind, Adapter]], heads: PrerouterHeads | None = None
) -> list[Stage]:
    """A stage for each phase, with the newest heads and LoRA until then.

    Args:
        heads: those of the stage before the first.

    Raises Edge0Error when an adapter is bound to another base.
    """
    stages: dict[str, Stage] = {}
    lora = None
    for phase, kind, adapter in adapters:
        check_together(
            bench.student.base.fingerprint,
            adapter if kind == "prerouter" else None,
            adapter if kind == "lora" else None,
        )
        if kind == "prerouter":
            heads = load_heads(adapter, bench.student.path.model.device)
        else:
            lora = adapter.tensors
        stages.pop(STAGE_NAMES[phase], None)  # a phase's heads alone are no stage once its LoRA is there
        stages[STAGE_NAMES[phase]] = Stage(STAGE_NAMES[phase], heads=heads, lora=lora)
    return list(stages.values())
