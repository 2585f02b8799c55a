"""Snapshots on the disk: found after a restart and by a second process, and never trusted blindly."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.prefix import folder as module
from edge0_runtime.prefix.folder import Folder
from edge0_runtime.snapshot import Rows, Snapshot
from tests.runtime.conversations import BEGIN, REQUESTS, ROOM, load, steps, turn
from tests.runtime.test_layered_prompts import directories

__all__ = ["directories"]
PROMPT, KNOWN = REQUESTS["go on"][0], 107
KEYS = [f"{number:064x}" for number in range(9)]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "of" / "prompts"


def files(cache: Path) -> list[Path]:
    return sorted(path for path in cache.iterdir() if path.name.endswith(".safetensors"))


def answer(directory: Path, cache: Path | None, prompt: list[int] = PROMPT, **flags: Any) -> tuple[list[Any], int]:
    """Of a new engine."""
    with load(directory, prefix_cache=ROOM, cache_dir=cache, **flags) as engine:
        return steps(engine, prompt)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "bailing_moe_v3"])
def test_another_engine_goes_on_from_the_files(
    directories: dict[str, Path], budget: Callable[..., float], cache: Path, family: str
) -> None:
    """The same bits, whether experts stream or not; its own arm, K and adapters only."""
    directory = directories[family]
    expected, _ = answer(directory, None)
    assert answer(directory, cache) == (expected, 0)
    assert len(files(cache)) == 3  # the last two turns' ends, and the first one's
    assert answer(directory, cache) == (expected, KNOWN)
    assert answer(directory, cache, memory_budget=budget(directory, 9) + ROOM) == (expected, KNOWN)
    for flags in ({"lora": False}, {"prerouter": False}, {"arm": "history"}):
        assert answer(directory, cache, **flags)[1] == 0
    assert len(files(cache)) == 12


def test_two_engines_share_a_folder(tiny_dir: Path, cache: Path) -> None:
    expected, _ = answer(tiny_dir, None)
    flags = {"prefix_cache": ROOM, "cache_dir": cache}
    with load(tiny_dir, **flags) as one, load(tiny_dir, **flags) as other:
        assert steps(one, PROMPT) == (expected, 0)
        one.prefixes.folder.wait()  # type: ignore[union-attr]
        assert steps(other, PROMPT) == (expected, KNOWN)
        for path in files(cache):
            path.unlink()  # as the other process may, at any time
        assert steps(other, REQUESTS["edit the second"][0])[1] == 0
        assert steps(one, PROMPT) == (expected, KNOWN)  # from memory


def with_another_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    path.write_bytes((1024).to_bytes(8, "little") + b"{}" + b" " * 1022)


def of_another_name(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(path.stem.encode(), b"0" * 64))


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("damage", [with_another_bit, truncated, empty, foreign, of_another_name, fifo])
def test_a_damaged_file_is_ignored_with_one_warning(
    tiny_dir: Path, cache: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    """The next shorter beginning serves; and the file is written anew, if it is one."""
    expected, _ = answer(tiny_dir, cache)
    for path in files(cache):
        damage(path)
    with (
        caplog.at_level(logging.WARNING, "edge0_runtime.prefix"),
        load(tiny_dir, prefix_cache=ROOM, cache_dir=cache) as engine,
    ):
        assert steps(engine, PROMPT)[0] == expected
        warned = warnings_of(caplog)
        assert warned and all("is ignored" in line and str(cache) in line for line in warned)
        assert len(set(warned)) == len(warned) <= 3
        engine.prefixes.clear()
        engine.prefixes.folder.wait()  # type: ignore[union-attr]
        assert steps(engine, PROMPT) == (expected, KNOWN)
        assert warnings_of(caplog) == warned


def test_the_folder_is_for_its_owner_alone(tiny_dir: Path, cache: Path) -> None:
    answer(tiny_dir, cache)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in files(cache)} == {0o600}


@pytest.fixture
def snapshot() -> Snapshot:
    """Of a layer of each kind, in 16 bits; 4,096 bytes of rows."""
    rows = Rows(None, 8, ((mx.ones((1, 2, 8, 64), mx.bfloat16), mx.zeros((1, 2, 8, 64), mx.bfloat16)), None))
    states = (None, [mx.ones((1, 3), mx.bfloat16), mx.ones((1, 2, 2))])
    return Snapshot(rows, states, -1, 77, None, None, {1: np.array([[3, 4]])})


def test_files_take_no_more_than_their_limit(cache: Path, snapshot: Snapshot) -> None:
    """The oldest go; one that was used is young. What another process left half-made goes too, and nothing else does."""
    kept = Folder(cache, 100_000 / 2**30)
    kept.save({KEYS[0]: snapshot})
    kept.wait()
    one = kept.nbytes(KEYS[0])
    assert one is not None
    kept = Folder(cache, 3.5 * one / 2**30)
    strangers = [
        cache / "notes.txt",
        cache / f".{KEYS[0]}.safetensors.1-aa.tmp",
        cache / f".{KEYS[1]}.safetensors.1-bb.tmp",
    ]
    for path in strangers:
        path.write_bytes(b"")
    os.utime(strangers[1], (time.time() - 2 * module.ABANDONED_S,) * 2)
    for number, key in enumerate(KEYS):
        kept.save({key: snapshot})
        kept.wait()
        os.utime(cache / f"{key}.safetensors", (number, number))  # oldest first
        assert kept.load(KEYS[0], lambda _: None) is not None  # and now the youngest
        assert sum(path.stat().st_size for path in files(cache)) <= 3.5 * one
    assert [path.stem for path in files(cache)] == [KEYS[0], *KEYS[-2:]]
    assert [path.exists() for path in strangers] == [True, False, True]
    kept.close()


def test_what_is_read_is_what_was_written(cache: Path, snapshot: Snapshot) -> None:
    kept = Folder(cache, 1)
    kept.save({KEYS[0]: snapshot})
    kept.close()
    found = Folder(cache, 1).load(KEYS[0], lambda _: None)
    assert found is not None
    assert (found.tokens, found.index, found.trail, found.features, found.since) == (8, -1, 77, None, None)
    assert found.nbytes == snapshot.nbytes and found.ran[1].tolist() == [[3, 4]]
    (keys, values), none = found.rows.parts
    assert none is None and found.states[0] is None
    assert keys.dtype == mx.bfloat16 and mx.all(keys == 1) and not mx.any(values)


@pytest.mark.parametrize("fault", ["a file", "read-only"])
def test_a_folder_that_cannot_be_is_named(tiny_dir: Path, tmp_path: Path, fault: str) -> None:
    directory = tmp_path / "cache"
    if fault == "a file":
        directory.write_text("")
    else:
        directory.mkdir(mode=0o500)
        if os.access(directory, os.W_OK):
            pytest.skip("this user may write everywhere")
    with pytest.raises(Edge0Error, match=r"cache_dir: .*cache: .*choose another directory"):
        load(tiny_dir, prefix_cache=ROOM, cache_dir=directory)


@pytest.mark.parametrize(
    ("flags", "said"),
    [({"cache_dir_limit": 0}, "cache_dir_limit: 0"), ({"prefix_cache": 0}, "give a larger prefix_cache")],
)
def test_a_folder_that_would_hold_nothing_is_refused(
    tiny_dir: Path, cache: Path, flags: dict[str, float], said: str
) -> None:
    with pytest.raises(Edge0Error, match=said):
        load(tiny_dir, **({"prefix_cache": ROOM, "cache_dir": cache} | flags))


def test_a_full_disk_is_said_once_and_stops_no_answer(
    tiny_dir: Path, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = answer(tiny_dir, None)

    def full(*_: object, **__: object) -> None:
        raise Edge0Error("no room to write")

    monkeypatch.setattr(module, "write_atomic", full)
    with load(tiny_dir, prefix_cache=ROOM, cache_dir=cache) as engine:
        assert steps(engine, PROMPT)[0] == expected
        steps(engine, [*turn(9, 30), *turn(10, 30), *BEGIN])
    assert [record.getMessage() for record in caplog.records if "cache_dir" in record.getMessage()] == [
        "cache_dir: nothing more is written: no room to write"
    ]
