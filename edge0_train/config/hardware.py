"""Machines as data: `hardware=1x80gb` is a file of configs/hardware with what fits such a machine, by tier and phase.

    machine: {processes: 1, device_gib: 79, host_gib: 160}     # of each process's device; of the host, all processes together
    settings:                                                  # a tier's own win over those of all, a phase's over those of all
      all: {all: {base: {device: cuda}}}                       # every tier: every phase
      35b: {student_sft: {optim: {micro_rows: 4}}}             # one tier: one phase
    too_small:                                                 # where nothing fits: why, and what to do instead
      35b: {teacher_text: "..."}

Of the two public tiers, every phase either fits the machine by the plan's own estimate, or stands in `too_small`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from edge0_runtime.contract import fields
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import read_yaml
from edge0_train.config.phases import PHASES
from edge0_train.config.sections import ALL, check_section

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """Sizes of a machine: of each process's device in GiB (0: it computes on its CPUs), and of the host's memory."""

    processes: int
    device_gib: float
    host_gib: float


@dataclass(frozen=True)
class Hardware:
    """A file of configs/hardware."""

    machine: Machine
    settings: Mapping[str, Any]
    too_small: Mapping[str, Mapping[str, str]]

    def settings_for(self, phase: str, tier: str) -> DictConfig | None:
        """The settings of a phase with a tier, merged, with what `too_small` says; None: nothing is said."""
        sections = [self.settings.get(name) or {} for name in (ALL, tier)]
        note = self.too_small.get(tier, {}).get(phase)
        merged = OmegaConf.merge(
            *(section.get(key) or {} for section in sections for key in (ALL, phase)),
            {"hardware": {"note": note}} if note else {},
        )
        assert isinstance(merged, DictConfig)
        return merged or None


def read_hardware(file: Path) -> Hardware:
    """A machine from its file. Raises Edge0Error naming file, field and fix."""
    data = read_yaml(file, "see configs/hardware for files that are right")
    fields.check_fields(str(file), Hardware, data)
    fields.check_fields(f"{file} machine", Machine, data["machine"])
    sizes = data["machine"]
    machine = Machine(
        fields.count(f"{file} machine.processes", sizes["processes"]),
        fields.positive(f"{file} machine.device_gib", sizes["device_gib"]) if sizes["device_gib"] else 0.0,
        fields.positive(f"{file} machine.host_gib", sizes["host_gib"]),
    )
    for name in ("settings", "too_small"):
        if not isinstance(data[name], Mapping):
            raise Edge0Error(f"{file} {name}: {data[name]!r} is not a mapping of tiers")
    for tier, section in data["settings"].items():
        check_section(f"{file} settings.{tier}", section)
    for tier, reasons in data["too_small"].items():
        unknown = [phase for phase in reasons if phase not in PHASES]
        if unknown:
            raise Edge0Error(f"{file} too_small.{tier}.{unknown[0]}: no such phase; choose one of {', '.join(PHASES)}")
    return Hardware(machine, data["settings"], data["too_small"])
