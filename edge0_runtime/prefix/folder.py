"""Snapshots on the disk, a file each: found again by another process, or after a restart.

The file's name is the snapshot's key, so nothing has to be looked up, and two processes may share a folder. A file appears in
one step (`strict_safetensors.write_atomic`). What is damaged or isn't ours is ignored with one warning. The oldest go first when
there are too many bytes; a file that is used becomes young again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.strict_safetensors import read_array, read_header, write_atomic
from edge0_runtime.plan import GIB
from edge0_runtime.snapshot import Rows, Snapshot, arrays_of

log = logging.getLogger(__name__)
METADATA = "edge0_prefix"
NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
TEMPORARY = re.compile(rf"\.{NAME.pattern}\..*\.tmp")
ABANDONED_S = 3600  # after which nobody is still writing a temporary file
Content = tuple[dict[str, np.ndarray], dict[str, Any]]
"""(tensors, document) of a file."""


class Folder:
    """A directory of snapshots; written to by a thread of its own, which handles bytes only."""

    def __init__(self, directory: Path, limit_gib: float) -> None:
        """Made if it isn't there, for its owner alone: what people wrote can be read out of snapshots.

        Raises Edge0Error where it can't be made or written to.
        """
        if not (math.isfinite(limit_gib) and limit_gib > 0):
            raise Edge0Error(f"cache_dir_limit: {limit_gib!r} must be a number of GiB larger than 0")
        self._directory, self._limit = directory, int(limit_gib * GIB)
        self._ignored: set[Path] = set()
        self._failed = False
        self._writer = ThreadPoolExecutor(1, "edge0-prefixes")
        self._writing: list[Future[None]] = []
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise Edge0Error(f"cache_dir: {directory}: {error.strerror}; choose another directory") from error
        if not os.access(directory, os.W_OK | os.X_OK):
            raise Edge0Error(f"cache_dir: {directory}: it can't be written to; choose another directory")

    def nbytes(self, key: str) -> int | None:
        """Of a snapshot's file; None if there is none that can be used."""
        path = self._path(key)
        with contextlib.suppress(OSError):
            return None if path in self._ignored else path.stat().st_size
        return None

    def load(self, key: str, features_of: Callable[[Sequence[mx.array]], Any]) -> Snapshot | None:
        """Read a snapshot; None if its file is gone, or damaged. `features_of` is the arm's."""
        path = self._path(key)
        try:
            os.utime(path)
            return _snapshot(*_read(path, key), features_of)
        except FileNotFoundError:  # another process may have made room
            return None
        except Exception as problem:  # whatever a stranger's bytes make of it
            self._ignored.add(path)
            log.warning("cache_dir: %s is ignored: %s", path, problem)
            return None

    def save(self, snapshots: Mapping[str, Snapshot]) -> None:
        """Begin to write those that aren't there yet."""
        contents = {self._path(key): _content(key, snapshot) for key, snapshot in snapshots.items()}
        self.wait()
        self._writing = [self._writer.submit(self._write, path, content) for path, content in contents.items()]

    def wait(self) -> None:
        """Until nothing is being written any more; its memory is free then."""
        for written in self._writing:
            written.result()
        self._writing = []

    def close(self) -> None:
        """Wait, and end the thread."""
        self.wait()
        self._writer.shutdown()

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}.safetensors"

    def _write(self, path: Path, content: Content) -> None:
        tensors, document = content
        nbytes = sum(array.nbytes for array in tensors.values())
        if self._failed or nbytes > self._limit or (path.exists() and path not in self._ignored):
            return
        try:
            document["crc32"] = _crc32(tensors)
            write_atomic(path, tensors, {METADATA: json.dumps(document)}, check=lambda file: os.chmod(file, 0o600))
            self._ignored.discard(path)
            self._make_room()
        except (Edge0Error, OSError) as problem:
            self._failed = True
            log.warning("cache_dir: nothing more is written: %s", problem)

    def _make_room(self) -> None:
        """Remove the oldest files, and what a killed process left."""
        files: list[tuple[float, int, Path]] = []
        for path in self._directory.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process is tidying up too
                status = path.stat()
                if NAME.fullmatch(path.name):
                    files.append((status.st_mtime, status.st_size, path))
                elif TEMPORARY.fullmatch(path.name) and status.st_mtime < time.time() - ABANDONED_S:
                    path.unlink()
        left = sum(nbytes for _, nbytes, _ in files)
        for _, nbytes, path in sorted(files):
            if left <= self._limit:
                break
            path.unlink(missing_ok=True)
            left -= nbytes


def folder_of(directory: str | os.PathLike[str] | None, limit_gib: float) -> Folder | None:
    """As a user says it; None: none."""
    return None if directory is None else Folder(Path(directory), limit_gib)


# -- a file's content ------------------------------------------------------------------------------------------------------


def _content(key: str, snapshot: Snapshot) -> Content:
    """A snapshot's arrays as bytes, not copied, under names that say where they belong."""
    stretches = list(snapshot.rows.chain())[::-1]
    arrays = {
        **{name: array for n, rows in enumerate(stretches) for name, array in _named(f"rows.{n}", rows.parts)},
        **dict(_named("states", snapshot.states)),
        **dict(_named("features", arrays_of(snapshot.features))),
        **({} if snapshot.since is None else {"since": snapshot.since}),
    }
    # NumPy has no bfloat16.
    halves = [name for name, array in arrays.items() if array.dtype == mx.bfloat16]
    arrays |= {name: arrays[name].view(mx.uint16) for name in halves}
    mx.eval(arrays)
    tensors = {name: np.asarray(array) for name, array in arrays.items()}
    tensors |= {f"ran.{layer}": experts_1K for layer, experts_1K in snapshot.ran.items()}
    document = {
        "key": key,
        "stops": [rows.stop for rows in stretches],
        "entries": len(snapshot.states),
        "index": snapshot.index,
        "trail": snapshot.trail,
        "bfloat16": halves,
    }
    return tensors, document


def _read(path: Path, key: str) -> Content:
    """Raises an exception of whatever kind when the file isn't as it was written under this key."""
    if not path.exists():
        raise FileNotFoundError(path)
    header = read_header(path)
    document = json.loads(header.metadata[METADATA])
    tensors = {name: read_array(header, name) for name in header.entries}
    if document["key"] != key:
        raise Edge0Error("it was written under another name")
    if document["crc32"] != _crc32(tensors):
        raise Edge0Error("its bytes aren't those that were written")
    return tensors, document


def _snapshot(
    tensors: Mapping[str, np.ndarray], document: Mapping[str, Any], features_of: Callable[[Sequence[mx.array]], Any]
) -> Snapshot:
    arrays = {name: mx.array(array) for name, array in tensors.items() if not name.startswith("ran.")}
    arrays |= {name: arrays[name].view(mx.bfloat16) for name in document["bfloat16"]}
    mx.eval(arrays)
    rows: Rows | None = None
    for number, stop in enumerate(document["stops"]):
        rows = Rows(rows, stop, _parts(arrays, f"rows.{number}", document["entries"]))
    assert rows is not None
    features = _parts(arrays, "features", len([name for name in arrays if name.startswith("features.")]))
    ran = {int(name.removeprefix("ran.")): array for name, array in tensors.items() if name.startswith("ran.")}
    return Snapshot(
        rows,
        _parts(arrays, "states", document["entries"]),
        document["index"],
        document["trail"],
        features_of(features) if features else None,
        arrays.get("since"),
        ran,
    )


def _named(room: str, parts: Sequence[Any]) -> Iterator[tuple[str, mx.array]]:
    for number, part in enumerate(parts):
        leaves: list[tuple[str, mx.array]] = [] if part is None else tree_flatten(part)  # type: ignore[assignment]
        yield from ((f"{room}.{number}.{path}".rstrip("."), array) for path, array in leaves)


def _parts(arrays: Mapping[str, mx.array], room: str, count: int) -> tuple[Any, ...]:
    """`_named` the other way: as many parts, None for one that has no array."""
    parts: list[Any] = []
    for number in range(count):
        name = f"{room}.{number}"
        leaves = [(key.removeprefix(f"{name}."), array) for key, array in arrays.items() if key.startswith(f"{name}.")]
        parts.append(arrays[name] if name in arrays else tree_unflatten(leaves) if leaves else None)
    return tuple(parts)


def _crc32(tensors: Mapping[str, np.ndarray]) -> int:
    found = 0
    for name in sorted(tensors):
        found = zlib.crc32(name.encode(), found)
        found = zlib.crc32(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data, found)
    return found
