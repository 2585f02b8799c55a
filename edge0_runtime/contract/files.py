"""Plain files for the contract: read in full or not at all, parsed strictly, replaced in one step."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import secrets
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from edge0_runtime.contract.errors import Edge0Error

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DISK_FAILED = (errno.EIO, errno.EROFS)
_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.ENOTSUP)  # network and FUSE file systems that have none


def open_regular(path: Path) -> io.FileIO:
    """Open a file for unbuffered reading. Raises Edge0Error naming it if that cannot be done."""
    try:
        # A FIFO or a device would block or never end.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise Edge0Error(f"{path}: not a regular file")
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise Edge0Error(f"{path}: cannot be read: {error.strerror or error}") from error


def read_exact(file: io.FileIO, path: Path, offset: int, view: memoryview) -> None:
    """Fill `view` with the file's bytes from `offset` on; loops, since one read may return fewer.

    Raises Edge0Error naming file, offset, wanted and got on a short read or an I/O error.
    """
    wanted, got = len(view), 0
    reason = "the file was truncated or replaced"
    try:
        file.seek(offset)
        while got < wanted:
            count = file.readinto(view[got:])
            if not count:
                break
            got += count
    except OSError as error:
        reason = error.strerror or str(error)
    if got < wanted:
        raise Edge0Error(f"{path}: read at offset {offset} failed: wanted {wanted} bytes, got {got}: {reason}")


def sha256_file(path: str | Path) -> str:
    """sha256 of a file's bytes as 64 hexadecimal digits. Raises Edge0Error if it cannot be read."""
    with open_regular(Path(path)) as file:
        try:
            return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise Edge0Error(f"{path}: cannot be read: {error.strerror or error}") from error


def strict_json(text: str | bytes) -> Any:
    """Parse JSON with duplicate keys, NaN and Infinity refused. Raises ValueError that says what is wrong."""
    duplicates: set[str] = set()

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        duplicates.update(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return dict(pairs)

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not a JSON number")

    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if duplicates:
        raise ValueError(f"duplicate keys: {', '.join(map(shown, sorted(duplicates)))}")
    return value


def raise_problems(what: str, problems: Iterable[str], fix: str) -> None:
    """Raise one Edge0Error that lists all problems; nothing if there are none."""
    problems = list(problems)
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise Edge0Error(f"{what}:{listed}\n{fix}")


def shown(value: Any) -> str:
    """repr() for an error message; the value may be hostile, so it is escaped and cut."""
    text = ascii(value)
    return text if len(text) <= 200 else text[:200] + "..."


@contextlib.contextmanager
def atomic_replace(path: str | Path, needed_bytes: int | None = None) -> Iterator[Path]:
    """Replace `path` in one step by what the body writes to the temporary path it is given.

        with atomic_replace(path) as temporary:
            torch.save(state, temporary)

    On success the file is on the disk (fsync of file and directory) before this returns. If the body or a
    step of ours fails, the temporary file is removed and the old file is untouched. A full or failing disk,
    or a directory that cannot be written to, is an Edge0Error naming the path (and `needed_bytes`, if given);
    other errors pass as they are.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        _fsync(temporary)
        os.replace(temporary, path)
    except OSError as error:
        if error.errno in _NO_ROOM:
            need = "" if needed_bytes is None else f" {needed_bytes} bytes"
            raise Edge0Error(
                f"{path}: no room to write{need} ({error.strerror}); free space in {path.parent}."
                " The old file is unchanged"
            ) from error
        if error.errno in _DISK_FAILED or error.filename == str(temporary):
            raise Edge0Error(f"{path}: cannot be written: {error.strerror}. The old file is unchanged") from error
        raise
    finally:
        with contextlib.suppress(OSError):  # after the rename there is nothing to remove
            temporary.unlink()
    try:
        _fsync(path.parent)  # else a power cut may undo the rename
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
