"""Four memories that are often mixed up: MLX's allocator, the process, the page cache, and what the device delivered.

Linux is measured fully; where a system doesn't tell, the value is None.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

MINCORE_STEP = 2**30  # bytes of a file looked at in one go


@dataclass(frozen=True)
class ProcessIo:
    """Bytes since the process began. requested: by its read calls; device: that the page cache didn't have."""

    requested: int
    device: int


def process_io() -> ProcessIo | None:
    """From /proc/self/io; None elsewhere."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    values = dict(line.split(": ") for line in lines)
    return ProcessIo(int(values["rchar"]), int(values["read_bytes"]))


def reset_peak_rss() -> None:
    """Forget the process's peak so far, where the system lets it; else `peak_rss_bytes` is since its start."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss_bytes() -> int:
    """The largest resident set since `reset_peak_rss`."""
    try:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB here


def rss_bytes() -> int:
    """The resident set now."""
    rss: int = psutil.Process().memory_info().rss
    return rss


def page_cache_bytes(paths: Iterable[Path]) -> int | None:
    """How much of these files lies in the page cache, from mincore(2) on pages nobody touches; None without it."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        mincore = libc.mincore
    except (OSError, AttributeError):
        return None
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    pages = 0
    for path in paths:
        size = path.stat().st_size
        with path.open("rb") as file:
            for start in range(0, size, MINCORE_STEP):
                length = min(MINCORE_STEP, size - start)
                # A private copy-on-write mapping, for Python gives an address of writable memory only.
                with mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=start) as view:
                    flags = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
                    anchor = ctypes.c_char.from_buffer(view)
                    failed = mincore(ctypes.addressof(anchor), length, flags.ctypes.data)
                    del anchor
                if failed:
                    return None
                pages += int((flags & 1).sum())
    return pages * mmap.PAGESIZE


def drop_page_cache(paths: Iterable[Path]) -> bool:
    """Have the system forget these files' clean pages; False where it has no such call (macOS: `purge`)."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
    return True
