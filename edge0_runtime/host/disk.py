"""How fast the disk gives experts: the engine's own ranges at the engine's own depth, past the page cache."""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge0_runtime.experts.store import ExpertStore

BLOCK = 4096  # direct reads begin and end at multiples of it
F_NOCACHE = 48  # macOS


@dataclass(frozen=True)
class DiskSpeed:
    """`experts` experts read by `threads` threads in `seconds`; nbytes: asked for, without the blocks around them."""

    threads: int
    experts: int
    nbytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """Of the bytes asked for: what an engine with as many threads may count on."""
        return self.nbytes / self.seconds

    @property
    def ms_per_expert(self) -> float:
        """All threads together: an expert's share of the time, not how long one read takes."""
        return 1e3 * self.seconds / self.experts


def disk_speed(store: ExpertStore, *, threads: int, max_bytes: int, seed: int = 0) -> DiskSpeed | None:
    """Read random experts of all layers once each, up to `max_bytes`, without touching the page cache.

    None where the file system can't read directly (tmpfs).
    """
    pairs = [(layer, expert) for layer in store.tensors for expert in range(store.num_experts)]
    np.random.default_rng(seed).shuffle(pairs)
    count = max(1, min(len(pairs), max_bytes // max(map(store.expert_nbytes, store.tensors))))
    files: dict[Path, int] = {}
    try:
        for path in {tensor.path for layer in store.tensors.values() for tensor in layer}:
            files[path] = _open_direct(path)
        buffers = threading.local()
        began = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda pair: _read_expert(store, files, buffers, *pair), pairs[:count]))
        seconds = time.perf_counter() - began
    except OSError:
        return None
    finally:
        for file in files.values():
            os.close(file)
    return DiskSpeed(threads, count, sum(store.expert_nbytes(layer) for layer, _ in pairs[:count]), seconds)


def depth_sweep(store: ExpertStore, threads: Sequence[int], max_bytes: int) -> list[DiskSpeed]:
    """`disk_speed` at several depths, other experts each time."""
    speeds = (disk_speed(store, threads=count, max_bytes=max_bytes, seed=count) for count in threads)
    return [speed for speed in speeds if speed is not None]


def _open_direct(path: Path) -> int:
    if sys.platform == "darwin":
        file = os.open(path, os.O_RDONLY)
        fcntl.fcntl(file, F_NOCACHE, 1)
        return file
    return os.open(path, os.O_RDONLY | os.O_DIRECT)


def _read_expert(store: ExpertStore, files: dict[Path, int], buffers: threading.local, layer: int, expert: int) -> None:
    for tensor in store.tensors[layer]:
        start = tensor.start + expert * tensor.nbytes
        first = start // BLOCK * BLOCK
        size = -(-(start + tensor.nbytes - first) // BLOCK) * BLOCK
        if getattr(buffers, "size", 0) < size:
            buffers.memory, buffers.size = memoryview(mmap.mmap(-1, size)), size  # page-aligned
        os.preadv(files[tensor.path], [buffers.memory[:size]], first)
