"""Plain files of both packages: whatever a person can hand over is read here, in full or not at all, and parsed strictly.

A reader takes regular files only, up to a size that nature gives its kind, and says in one sentence which file is wrong, why, and
what to do. Files are replaced in one step.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import io
import json
import os
import secrets
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from edge0_runtime.contract.errors import Edge0Error

MIB = 2**20
MAX_JSON = 8 * MIB
"""Of a configuration; a model's config.json has some kilobytes."""
MAX_INDEX = 32 * MIB
"""Of a checkpoint's index: some 100 bytes a tensor, 92,000 tensors in the largest that is published."""
MAX_TOKENIZER = 128 * MIB
"""Of a tokenizer.json, which the tokenizer's library parses; the largest published ones have 35 MB."""
MAX_YAML = MIB // 4
MAX_YAML_DEPTH = 20
"""Of mappings and lists in each other; what reads a deeper one further recurses."""
MAX_LINE = 8 * MIB
"""Of one line of a JSON-lines file."""
MAX_VALUES = 2_000_000
"""In one JSON text: what a value costs in memory is many times its three bytes of text."""
MAX_TOKENIZER_VALUES = 4 * MAX_VALUES
"""Of a tokenizer.json: vocabulary and merges of the largest published ones are just below 2 million."""

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


def read_bytes(path: Path, at_most: int = MAX_JSON) -> bytes:
    """A file's bytes. Raises Edge0Error: it is no regular file, cannot be read, or has more than `at_most` bytes."""
    with open_regular(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            data = b"" if size > at_most else file.read(at_most + 1)
        except OSError as error:
            raise Edge0Error(f"{path}: cannot be read: {error.strerror or error}") from error
    check_size(path, max(size, len(data)), at_most)
    return data


def check_size(path: Path, size: int, at_most: int) -> None:
    """Raise Edge0Error when a file of `size` bytes has more than `at_most`."""
    if size > at_most:
        raise Edge0Error(f"{path}: has {size:,} bytes, more than the {at_most:,} of any such file; is it another file?")


def read_text(path: Path, at_most: int = MAX_JSON) -> str:
    """A UTF-8 file's text. Raises Edge0Error as `read_bytes`, and where it is not UTF-8."""
    try:
        return read_bytes(path, at_most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise Edge0Error(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error


def read_json(path: Path, fix: str, at_most: int = MAX_JSON, values: int = MAX_VALUES) -> dict[str, Any]:
    """The object of a strict JSON file (`strict_json`).

    Args:
        fix: how to get a good one: the end of the sentence "<file>: not strict JSON (...); <fix>".
        at_most: bytes. values: at most so many of them.

    Raises Edge0Error as `read_bytes`, and where it is no JSON or no object.
    """
    try:
        value = strict_json(read_bytes(path, at_most), values)
    except ValueError as error:
        raise Edge0Error(f"{path}: not strict JSON ({error}); {fix}") from error
    if not isinstance(value, dict):
        raise Edge0Error(f"{path}: not a JSON object but {shown(value)}; {fix}")
    return value


def read_json_lines(path: Path, fix: str, bad: Callable[[int, str], None] | None = None) -> Iterator[tuple[int, Any]]:
    """(line number, value) of every line of a JSON-lines file (.gz: compressed), one at a time; blank lines are passed over.

    Args:
        bad: told the number of a line that is no strict JSON, and why; the line is passed over then.

    Raises Edge0Error, naming file and line, as `read_json` does; with `bad`, only for a file that cannot be read.
    """

    def passed_over(number: int, reason: str) -> None:
        raise Edge0Error(f"{path}, line {number}: {reason}; {fix}")

    tell = bad or passed_over
    with open_regular(path) as raw, _decompressed(raw, path) as file:
        for number, line in enumerate(_lines(file, path), 1):
            if line is None:
                tell(number, f"longer than {MAX_LINE:,} bytes")
            elif not line.isspace():
                try:
                    value = strict_json(line.rstrip(b"\r\n"))
                except ValueError as error:
                    tell(number, f"not strict JSON ({error})")
                else:
                    yield number, value


def _decompressed(raw: io.FileIO, path: Path) -> io.BufferedIOBase:
    return gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else io.BufferedReader(raw)


def _lines(file: io.BufferedIOBase, path: Path) -> Iterator[bytes | None]:
    """A file's lines; None for one that is longer than `MAX_LINE`, of which no more than that is held."""
    try:
        while line := file.readline(MAX_LINE + 1):
            if len(line) <= MAX_LINE:
                yield line
                continue
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE)
            yield None
    except (OSError, EOFError, zlib.error) as error:
        raise Edge0Error(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def read_yaml(path: Path, fix: str) -> dict[str, Any]:
    """The mapping of a YAML file, without aliases, duplicate keys or tags of other languages, and not nested too deeply.

    Raises Edge0Error as `read_text`, and where it is no YAML or no mapping.
    """
    text = read_text(path, MAX_YAML)
    try:
        value = yaml.load(text, _StrictYaml)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise Edge0Error(f"{path}: not plain YAML ({one_line(error)}); {fix}") from error
    if not isinstance(value, dict):
        raise Edge0Error(f"{path}: not a YAML mapping but {shown(value)}; {fix}")
    return value


class _StrictYaml(yaml.SafeLoader):
    """A few lines of aliases can stand for gigabytes, and of two equal keys one would vanish."""

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("aliases are not supported")
        if self._depth > MAX_YAML_DEPTH:
            raise yaml.YAMLError("nested too deeply")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key.value, str)]
        twice = sorted(key for key, count in Counter(keys).items() if count > 1)
        if twice:
            raise yaml.YAMLError(f"duplicate keys: {', '.join(map(shown, twice))}")
        return super().construct_mapping(node, deep)


def sha256_file(path: str | Path) -> str:
    """sha256 of a file's bytes as 64 hexadecimal digits. Raises Edge0Error if it cannot be read."""
    with open_regular(Path(path)) as file:
        try:
            return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise Edge0Error(f"{path}: cannot be read: {error.strerror or error}") from error


def strict_json(text: str | bytes, values: int = MAX_VALUES) -> Any:
    """Parse JSON of at most so many values; duplicate keys, NaN and Infinity refused. Raises ValueError saying what is wrong."""
    duplicates: set[str] = set()

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        duplicates.update(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return dict(pairs)

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not a JSON number")

    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        if sum(map(text.count, ",[{")) > values:
            raise ValueError(f"more than {values:,} values")
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
    try:
        text = ascii(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 200 else text[:200] + "..."


def unquoted(text: str) -> str:
    """`shown` of a text that needs no quotes around it in a sentence: a name, a path, a word of a command line."""
    text = ascii(text)[1:-1]
    return text if len(text) <= 200 else text[:200] + "..."


def one_line(error: BaseException) -> str:
    """What a library's exception says, on one line; it may quote a stranger's file, so it is escaped and cut."""
    text = printable(" ".join(str(error).split()) or type(error).__name__)
    return text if len(text) <= 300 else text[:300] + "..."


def printable(text: str, lines: int = 40, columns: int = 2000) -> str:
    """A text that may quote strangers, made safe for a terminal: control characters escaped, and cut.

    Of too many lines the first and the last stay, of a long line its two ends: an error ends with what to do.
    """
    kept = text.split("\n")
    if len(kept) > lines:
        kept = [*kept[: lines - 1], f"  ... {len(kept) - lines:,} more lines ...", kept[-1]]
    half = columns // 2
    short = (line if len(line) <= columns else f"{line[:half]} ... {line[-half:]}" for line in kept)
    return "\n".join("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) for line in short)


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
