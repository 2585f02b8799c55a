"""Training checkpoints as strict safetensors: trainables and optimizer state; no pickle, atomic, oldest dropped.

All other state of a run is a function of the step number: data order, learning rate and random seeds are derived from
(seed, step), so restoring these tensors and the step restores the run bit for bit.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import atomic_replace
from edge0_runtime.contract.strict_safetensors import read_header

KEEP = 2
"""The newest, and the one before it for when the newest turns out to be damaged."""


class Damaged(Edge0Error):
    """A checkpoint that cannot be read, or whose bytes are not those that were written."""


def save_checkpoint(
    directory: Path, step: int, tokens: int, trainable: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> Path:
    """Write `step-<n>.safetensors` after optimizer step n; of the others, the newest before it is kept."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in trainable.items():
        tensors[f"value:{name}"] = parameter.detach().cpu().contiguous()
        for key, value in optimizer.state[parameter].items():
            tensors[f"{key}:{name}"] = value.detach().cpu().contiguous()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"step-{step:08d}.safetensors"
    with atomic_replace(path) as temporary:
        # As bytes: the library's own file writing reports a full disk in a type that atomic_replace cannot know.
        metadata = {"step": str(step), "tokens": str(tokens), "crc32": checksum(tensors)}
        temporary.write_bytes(save(tensors, metadata))
    upto = [one for one in checkpoints(directory) if one <= path]
    for other in {*checkpoints(directory)} - {*upto[-KEEP:]}:
        other.unlink()  # older; or later, damaged, and of a step that has been done again
    return path


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(p for p in directory.glob("step-*.safetensors") if re.fullmatch(r"step-\d{8}\.safetensors", p.name))


def load_newest(
    directory: Path, trainable: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> Path | None:
    """Restore from the newest checkpoint that is whole, saying on stderr which ones are not; None where there is none at all.

    Raises Edge0Error when all are damaged, or as `load_checkpoint`.
    """
    damaged: list[str] = []
    for path in reversed(checkpoints(directory)):
        try:
            load_checkpoint(path, trainable, optimizer)
        except Damaged as error:
            damaged.append(str(error))
            continue
        for problem in damaged:
            print(f"{problem}; resuming from {path.name} instead", file=sys.stderr)
        return path
    if damaged:
        raise Edge0Error(
            f"{'; '.join(damaged)}: no checkpoint is left to resume from; delete {directory} to begin at step 0 with resume=true"
        )
    return None


@torch.no_grad()
def load_checkpoint(
    path: Path, trainable: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> tuple[int, int]:
    """Restore trainables and optimizer state; returns step and tokens. All is checked before anything is touched.

    Raises `Damaged`, or Edge0Error when the checkpoint is another run's.
    """
    metadata, tensors = _read(path)
    if not all(metadata.get(name, "").isdigit() for name in ("step", "tokens")):
        raise Edge0Error(
            f"{path}: has no step and tokens in its metadata; resume from a checkpoint that this program wrote"
        )
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
                f"{path}: lacks {name!r} of shape {tuple(parameter.shape)}; resume with the settings it began with"
            )
    for name, parameter in trainable.items():
        parameter.copy_(state[name].pop("value"))
        optimizer.state[parameter] = {key: value.to(_place(key, parameter)) for key, value in state[name].items()}
    return int(metadata["step"]), int(metadata["tokens"])


def checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """CRC-32 of all bytes, by name: a disk that lost power may leave zeros where the header promises tensors."""
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, zlib.crc32(name.encode(), crc))
    return f"{crc:08x}"


def _read(path: Path) -> tuple[Mapping[str, str], dict[str, torch.Tensor]]:
    """Metadata and tensors of a whole file. Raises `Damaged` (checkpoints of before the checksum have none to compare)."""
    try:
        metadata = read_header(path).metadata  # the strict reader names a truncated file
        tensors = load_file(str(path))
    except (Edge0Error, SafetensorError, OSError) as error:
        raise Damaged(f"{path}: damaged (cut short, or no safetensors file)") from error
    if metadata.get("crc32", (found := checksum(tensors))) != found:
        raise Damaged(f"{path}: damaged (its bytes are not those that were written)")
    return metadata, tensors


def _place(key: str, parameter: nn.Parameter) -> torch.device:
    """AdamW keeps its step counter on the CPU and its moments beside the parameter."""
    return torch.device("cpu") if key == "step" else parameter.device
