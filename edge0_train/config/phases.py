"""The phases as data. A new one is a line here and a module `edge0_train/phases/<name>.py` with a function of the same name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class PhaseFacts:
    """What the command line, the chain and the tables know of a phase.

    Attributes:
        sentence: what it does, for `--help` and the page of all settings.
        needs: settings without a default that it reads.
        reads: what it must find when it starts, in the order in which it is made (the table of checks is `inputs.CHECKS`).
        writes: what later phases of a chain then find.
        defaults: {setting: value} where the phase's own default is not the one of the map of all settings.
        trains: it runs the optimizer loop: a W&B run is opened.
        records_inputs: its run directory says in inputs.json what it was made from.
        goes_on: it trains on from files of a tier that may differ in name and stickiness.
        alone: it is one process's work: the other ranks wait.
        in_chain: it belongs to the default of `chain`, in the order of this table.
        stage: the name of what it has made in the table of phase=evaluate; empty: `+ <name of the phase>`.
    """

    sentence: str
    needs: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    trains: bool = False
    records_inputs: bool = False
    goes_on: bool = False
    alone: bool = False
    in_chain: bool = True
    stage: str = ""


PHASES: dict[str, PhaseFacts] = {
    "quantize": PhaseFacts(
        "the int4 deployment checkpoint from a transformers directory",
        reads=("source", "new base"),
        writes=("base",),
        needs=("base.source",),
        alone=True,
    ),
    "teacher_text": PhaseFacts(
        "the teacher completes prompts: the rows that heads and LoRA train on",
        reads=("device", "writer", "teacher", "prompts"),
        writes=("text",),
        needs=("teacher.directory", "text.prompts"),
        records_inputs=True,
    ),
    "head_distill": PhaseFacts(
        "prerouter heads against the next layer's true router, one token ahead",
        reads=("device", "base", "text"),
        writes=("prerouter", "heads below root"),
        trains=True,
        records_inputs=True,
        stage="heads only",
    ),
    "head_refine": PhaseFacts(
        "the same heads, trained on the features that their own routing produces",
        reads=("device", "base", "text", "prerouter"),
        writes=("prerouter", "heads below root"),
        trains=True,
        records_inputs=True,
        goes_on=True,
        stage="+ refinement",
    ),
    "student_sft": PhaseFacts(
        "the recovery LoRA on teacher text, prerouting on; the heads train along",
        reads=("device", "base", "text", "prerouter", "lora"),
        writes=("prerouter", "lora", "heads below root"),
        defaults={"inputs.lora": ""},
        trains=True,
        records_inputs=True,
        goes_on=True,
        stage="+ SFT",
    ),
    "on_policy": PhaseFacts(
        "the student writes, the teacher scores, the LoRA trains with reverse KL, in rounds",
        reads=("device", "loss", "teacher", "base", "prompts", "prerouter", "lora"),
        writes=("lora",),
        needs=("teacher.directory", "text.prompts"),
        defaults={"optim.lr": 5.0e-4},
        trains=True,
        records_inputs=True,
        stage="+ on-policy",
    ),
    "evaluate": PhaseFacts(
        "every stage on the same held-out prompts: one table",
        reads=("device", "teacher", "base", "text", "heads below root"),
        needs=("teacher.directory",),
        alone=True,
    ),
    "export": PhaseFacts(
        "the model directory: base, adapters, reference traces",
        reads=("device", "base", "text", "prerouter", "lora"),
        alone=True,
    ),
}
PHASE_NAMES = tuple(PHASES)
STAGE_NAMES = {name: facts.stage or f"+ {name}" for name, facts in PHASES.items()}
CHAIN = tuple(name for name, facts in PHASES.items() if facts.in_chain)
