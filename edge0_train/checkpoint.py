"""Training checkpoints as strict safetensors: trainables and optimizer state; no pickle, atomic, oldest dropped.

All other state of a run is a function of the step number: data order, learning rate and random seeds are derived from
(seed, step), so restoring these tensors and the step restores the run bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import nn

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import atomic_replace
from edge0_runtime.contract.strict_safetensors import read_header

KEEP = 2


def save_checkpoint(
    directory: Path, step: int, tokens: int, trainable: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> Path:
    """Write `step-<n>.safetensors` after optimizer step n, and drop all but the newest two."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in trainable.items():
        tensors[f"value:{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"{key}:{name}"] = value.detach()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"step-{step:08d}.safetensors"
    with atomic_replace(path) as temporary:
        # As bytes: the library's own file writing reports a full disk in a type that atomic_replace cannot know.
        metadata = {"step": str(step), "tokens": str(tokens)}
        temporary.write_bytes(save({k: v.cpu().contiguous() for k, v in tensors.items()}, metadata))
    for old in checkpoints(directory)[:-KEEP]:
        old.unlink()
    return path


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(p for p in directory.glob("step-*.safetensors") if re.fullmatch(r"step-\d{8}\.safetensors", p.name))


@torch.no_grad()
def load_checkpoint(
    path: Path, trainable: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> tuple[int, int]:
    """Restore trainables and optimizer state; returns step and tokens. Raises Edge0Error when the file is damaged or foreign."""
    # The strict reader names a truncated file before anything is touched.
    metadata = read_header(path).metadata
    if not all(metadata.get(name, "").isdigit() for name in ("step", "tokens")):
        raise Edge0Error(
            f"{path}: has no step and tokens in its metadata; resume from a checkpoint that this program wrote"
        )
    step, tokens = int(metadata["step"]), int(metadata["tokens"])
    tensors = load_file(str(path))
    state: dict[str, dict[str, torch.Tensor]] = {name: {} for name in trainable}
    for key, value in tensors.items():
        part, _, name = key.partition(":")
        if name not in state:
            raise Edge0Error(
                f"{path}: has {name!r}, which this run does not train; resume with the settings it began with"
            )
        state[name][part] = value
    for name, parameter in trainable.items():
        if "value" not in state[name] or state[name]["value"].shape != parameter.shape:
            raise Edge0Error(
                f"{path}: lacks {name!r} of shape {tuple(parameter.shape)}; resume from another checkpoint"
            )
        parameter.copy_(state[name].pop("value"))
        optimizer.state[parameter] = {key: value.to(_place(key, parameter)) for key, value in state[name].items()}
    return step, tokens


def _place(key: str, parameter: nn.Parameter) -> torch.device:
    """AdamW keeps its step counter on the CPU and its moments beside the parameter."""
    return torch.device("cpu") if key == "step" else parameter.device
