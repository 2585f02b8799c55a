"""What the machine gives: a device's memory, the host's, and room on a disk; and what of it a plan may count on."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from edge0_runtime.contract.machine import cpu_count, memory_limit_bytes
from edge0_train.config import Config

SHARE = 0.92
"""Of a memory that a plan's estimate may fill: the rest is for what it leaves out (contexts, fragmentation, workspaces)."""


@dataclass(frozen=True)
class Limits:
    """What a phase's processes may use.

    Attributes:
        name: of the machine, for messages. processes: of one training on it.
        device: bytes of a process's device; 0 where there is none, or it is a CPU. free: of these, now; None: not known.
        host: bytes of host memory for all processes together.
    """

    name: str
    processes: int
    device: int
    free: int | None
    host: int


def limits(config: Config) -> Limits:
    """Of this machine; of a dry run, those of the machine that `hardware` describes, and of this one what it leaves out."""
    told = config.hardware
    free, device = device_memory(config.base.device)
    host, processes = memory_limit_bytes(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not config.dry_run:  # what runs, runs here, whatever its settings were made for
        return Limits("this machine", processes, device, free, host)
    if told.device_gib:
        free, device = None, int(told.device_gib * 2**30)
    return Limits(
        told.name or "this machine", told.processes or processes, device, free, int(told.host_gib * 2**30) or host
    )


def gpus() -> int:
    """How many there are."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def has_gpu(device: str) -> bool:
    """Whether `base.device` is a GPU that is here; False for a CPU."""
    return device != "cpu" and int(device.partition(":")[2] or 0) < gpus()


def device_memory(device: str) -> tuple[int | None, int]:
    """(free, total) bytes of a CUDA device; (None, 0) where it is not here, or for a CPU."""
    if not has_gpu(device):
        return None, 0
    return torch.cuda.mem_get_info(device)


def device_name(device: str) -> str:
    """A device for people: the GPU's name, or the number of cores."""
    if has_gpu(device):
        return str(torch.cuda.get_device_name(device))
    return f"CPU, {cpu_count()} cores"


def disk_free(path: str | Path) -> int:
    """Free bytes of the file system that `path`, which need not exist, is or would be on."""
    place = Path(path).absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free
