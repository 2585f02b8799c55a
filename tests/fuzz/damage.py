"""How a directory of files is damaged, by accident or on purpose. A damage is data: a failing one can be read and kept."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

DEEP: Any = []
for _ in range(900):  # near the depth at which Python's parser gives up
    DEEP = [DEEP]
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 2**31, 10**30, 0.5, -0.0, 1e-39, 1e300,
    "", "x", "0", "\x1b[31m\u202e", "../../x", "y" * 100_000,
    [], [[1]], [None], ["x", 1], {}, {"x": {}}, {"": None}, DEEP, list(range(50_000)),
)  # fmt: skip


@dataclass(frozen=True)
class Damage:
    """One change of one file: which file, where in it, and to what; numbers count round."""

    kind: str
    file: int
    at: int
    value: int

    def apply(self, tree: Path, parts: Sequence[str] = ("",)) -> None:
        """Change the tree, in one of these files or folders of it."""
        found = {path for part in parts for path in (tree / part, *(tree / part).rglob("*"))}
        files = sorted(path for path in found if path.is_file() and not path.is_symlink())
        if files:
            KINDS[self.kind](files[self.file % len(files)], self, files)


def _truncate(path: Path, damage: Damage, _: list[Path]) -> None:
    os.truncate(path, damage.at % (path.stat().st_size + 1))


def _extend(path: Path, damage: Damage, _: list[Path]) -> None:
    with path.open("ab") as file:
        file.write(b"\x00 \n{"[: 1 + damage.at % 4])


def _flip(path: Path, damage: Damage, _: list[Path]) -> None:
    content = bytearray(path.read_bytes() or b" ")
    content[damage.at % len(content)] ^= 1 << damage.value % 8
    path.write_bytes(content)


def _junk(path: Path, damage: Damage, _: list[Path]) -> None:
    path.write_bytes(bytes((damage.at * (n + 1) * 2654435761 >> 16) % 256 for n in range(damage.at % 3000)))


def _swap(path: Path, damage: Damage, files: list[Path]) -> None:
    other = files[damage.at % len(files)]
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)


def _sparse(path: Path, _: Damage, __: list[Path]) -> None:
    path.write_bytes(b"")
    os.truncate(path, 2 << 30)


def _delete(path: Path, _: Damage, __: list[Path]) -> None:
    path.unlink()


def _directory(path: Path, _: Damage, __: list[Path]) -> None:
    path.unlink()
    path.mkdir()


def _fifo(path: Path, _: Damage, __: list[Path]) -> None:
    path.unlink()
    os.mkfifo(path)


def _link(path: Path, damage: Damage, files: list[Path]) -> None:
    targets = ("nowhere", path.name, ".", "/dev/zero", files[damage.at % len(files)])
    path.unlink()
    path.symlink_to(targets[damage.value % len(targets)])


def _unreadable(path: Path, _: Damage, __: list[Path]) -> None:
    path.chmod(0)  # root reads it all the same


def _nested(path: Path, damage: Damage, _: list[Path]) -> None:
    opening = (b"[", b'{"a":')[damage.value % 2]
    path.write_bytes(opening * (1 + damage.at % 200_000))


def _not_utf8(path: Path, damage: Damage, _: list[Path]) -> None:
    content = path.read_bytes()
    at = damage.at % (len(content) + 1)
    path.write_bytes(content[:at] + b"\xff\xfe\x80" + content[at:])


def _byte_order_mark(path: Path, _: Damage, __: list[Path]) -> None:
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())


def _crlf(path: Path, _: Damage, __: list[Path]) -> None:
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


def _value(path: Path, damage: Damage, _: list[Path]) -> None:
    """Another value somewhere in a document: JSON, YAML, a safetensors header, or the JSON text inside one."""
    _rewrite(path, lambda document: _replace(document, damage.at, VALUES[damage.value % len(VALUES)]))


def _drop(path: Path, damage: Damage, _: list[Path]) -> None:
    """A field or an item less."""
    _rewrite(path, lambda document: _replace(document, damage.at, _NOTHING))


_NOTHING = object()
KINDS: dict[str, Callable[[Path, Damage, list[Path]], None]] = {
    "truncate": _truncate, "extend": _extend, "flip": _flip, "junk": _junk, "swap": _swap, "sparse": _sparse, "delete": _delete,
    "directory": _directory, "fifo": _fifo, "link": _link, "unreadable": _unreadable, "nested": _nested, "not_utf8": _not_utf8,
    "byte_order_mark": _byte_order_mark, "crlf": _crlf, "value": _value, "drop": _drop,
}  # fmt: skip
_OFTEN = ("value",) * 14 + ("drop",) * 4 + ("flip",) * 2  # the others have few outcomes
DAMAGES = st.builds(
    Damage,
    kind=st.sampled_from([*KINDS, *_OFTEN]),
    file=st.integers(0, 10_000),
    at=st.integers(0, 2**24),
    value=st.integers(0, 10_000),
)


def _rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    try:
        if path.suffix == ".safetensors":
            _rewrite_header(path, change)
        elif path.suffix == ".yaml":
            path.write_text(json.dumps(change(yaml.safe_load(path.read_text()))))
        else:
            path.write_text(json.dumps(change(json.loads(path.read_text()))))
    except (ValueError, yaml.YAMLError, OSError, RecursionError):
        path.write_bytes(b"null")  # a document of another kind, or damaged already


def _rewrite_header(path: Path, change: Callable[[Any], Any]) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = change(json.loads(content[8 : 8 + length]))
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def _replace(document: Any, at: int, value: Any) -> Any:
    """The document with one value replaced (or left out): the `at`-th of all, fields at every depth weighing alike."""
    places = list(_places(document))
    if not places:
        return None if value is _NOTHING else value
    rest, place = divmod(at, len(places))
    holder, key = places[place]
    if isinstance(holder[key], str) and holder[key][:1] in "{[" and rest % 4:  # a document in a string: the contract
        with contextlib.suppress(ValueError, RecursionError):
            value = json.dumps(_replace(json.loads(holder[key]), rest // 4, value))
    if value is _NOTHING:
        del holder[key]
    else:
        holder[key] = value
    return document


def _places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Where values are: of a long list or mapping only the first ones, so that a vocabulary doesn't outweigh the rest."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys[:60]:
        yield value, key
        if depth < 20:
            yield from _places(value[key], depth + 1)


def copy_tree(source: Path, target: Path) -> Path:
    """A fresh copy that may be damaged."""
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target))


def snapshot(tree: Path) -> dict[str, tuple[int, int, int]]:
    """What would show that somebody changed the tree: every name with its mode, and of files size and time of change."""
    found = {}
    for path in tree.rglob("*"):
        state = path.lstat()
        content = (0, 0) if stat.S_ISDIR(state.st_mode) else (state.st_size, state.st_mtime_ns)
        found[str(path.relative_to(tree))] = (state.st_mode, *content)
    return found
