"""A lock file that belongs to one process and is released by the system when that process ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import sys
from pathlib import Path

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import unquoted

_TAKEN = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)


def acquire(path: Path, what: str) -> int:
    """Take the lock at `path` and write into it who has it; returns what `release` needs. Its owner may take it again.

    Raises Edge0Error about `what`, naming the process and its machine, while another one has it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # Of the process, unlike flock: a child that was forked for data loading keeps nothing alive, and NFS knows it too.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = unquoted(os.read(descriptor, 100).decode(errors="replace").strip())
        if error.errno in _TAKEN:
            os.close(descriptor)
            raise Edge0Error(
                f"{what} is in use by {holder or 'another process'}; wait until it ends, or choose another run_dir"
            ) from error
        if error.errno not in _NO_LOCKS:
            os.close(descriptor)
            raise
        print(f"{path}: this file system has no locks; see to it that one process works here", file=sys.stderr)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
    return descriptor


def release(descriptor: int) -> None:
    """Let go of a lock."""
    os.close(descriptor)
