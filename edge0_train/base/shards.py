"""Writing a checkpoint's safetensors files tensor by tensor, at places planned from shapes: little memory is needed."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edge0_runtime.contract.checkpoint import INDEX_NAME
from edge0_runtime.contract.errors import Edge0Error
from edge0_train.base.layout import Kind, nbytes
from edge0_train.base.weights import TORCH_DTYPES

SHARD_BYTES = 5 << 30  # mlx-lm's
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class Group:
    """Tensors that lie in one shard.

    Attributes:
        kinds: {tensor name: (shape, dtype)}.
        tensors: makes them, when they are to be written; what it leaves out becomes a hole of zeros.
    """

    kinds: Mapping[str, Kind]
    tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]]

    def nbytes(self) -> int:
        """Tensor bytes of the group, without the file's header."""
        return sum(nbytes(*kind) for kind in self.kinds.values())


def write_shards(directory: Path, groups: Sequence[Group], shard_bytes: int = SHARD_BYTES) -> int:
    """Write model.safetensors, or numbered shards and their index. Returns the number of shards.

    Args:
        shard_bytes: more tensor bytes are split into several files, between groups.
    """
    shards: list[list[Group]] = []
    room = 0
    for group in groups:
        if not shards or group.nbytes() > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(group)
        room -= group.nbytes()
    weight_map: dict[str, str] = {}
    for n, shard in enumerate(shards, start=1):
        numbered = f"model-{n:05d}-of-{len(shards):05d}.safetensors"
        file_name = numbered if len(shards) > 1 else "model.safetensors"
        weight_map |= dict.fromkeys(_write_shard(directory / file_name, shard), file_name)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(group.nbytes() for group in groups)},
            "weight_map": dict(sorted(weight_map.items())),
        }
        write_json(directory / INDEX_NAME, index)
    return len(shards)


def _write_shard(path: Path, groups: Sequence[Group]) -> list[str]:
    """Header first, from the plan; then each tensor at its place, as it is made. Returns the tensor names."""
    kinds = {name: kind for group in groups for name, kind in group.kinds.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    starts: dict[str, int] = {}
    end = 0
    # Wide dtypes first, so that every tensor is aligned to its own.
    for name in sorted(kinds, key=lambda name: (-kinds[name][1].itemsize, name)):
        shape, dtype = kinds[name]
        starts[name], end = end, end + nbytes(shape, dtype)
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [starts[name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        for group in groups:
            for name, tensor in group.tensors():
                assert (tuple(tensor.shape), tensor.dtype) == kinds[name], name
                file.seek(8 + len(text) + starts[name])
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    return list(kinds)


def write_json(path: Path, value: Any) -> None:
    """As transformers and mlx-lm write config.json: UTF-8, indented by 4, with a last newline."""
    path.write_text(json.dumps(value, indent=4) + "\n", encoding="utf-8")


def check_new(path: Path) -> None:
    """Raise Edge0Error when an output directory exists already."""
    if path.exists():
        raise Edge0Error(f"output directory {path} exists; delete it or name another one")


@contextmanager
def new_directory(path: Path, needed_bytes: int) -> Iterator[Path]:
    """A directory that the body fills; it takes its name when the body is done, and vanishes if it fails.

    Raises Edge0Error when `path` exists or has no room.
    """
    check_new(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < needed_bytes:
        raise Edge0Error(
            f"output directory {path}: needs {needed_bytes} bytes, {free} are free; free some or name another"
        )
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    partial.mkdir()
    try:
        yield partial
        os.rename(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # after the rename there is nothing to remove
