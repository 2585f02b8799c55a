"""When the disk fails a request fails, and says where; nothing else breaks, and no thread stays behind."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge0_runtime import cli
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.engine import Engine
from edge0_runtime.experts.pool import SlotPool
from edge0_runtime.experts.reader import Reader

PREADV = os.preadv
PLACE = r"model\.safetensors.*offset \d+.*wanted \d+ bytes, got \d+"


def ids(engine: Engine, prompt: list[int], tokens: int = 6) -> list[int]:
    return [step.token for step in engine.generate(prompt, max_tokens=tokens, ignore_eos=True)]


def io_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("edge0-io")]


@pytest.fixture
def own_dir(tiny_dir: Path, tmp_path: Path) -> Path:
    """A model directory whose files may be damaged."""
    return Path(shutil.copytree(tiny_dir, tmp_path / "model"))


class Failing:
    """os.preadv that fails from the n-th call on, until `ends`."""

    def __init__(self, calls: int, error: int | None) -> None:
        self.left, self.error = calls, error

    def __call__(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        self.left -= 1  # some calls more or fewer between threads don't matter
        if self.left >= 0:
            return PREADV(fd, buffers, offset)
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        return 0


@pytest.mark.parametrize("arm", ["prerouter", "on_demand", "same_token", "history", "lookahead"])
@pytest.mark.parametrize("error", [errno.EIO, None])
def test_a_disk_error_at_any_point_fails_that_request_only(
    tiny_dir: Path,
    budget: Callable[..., float],
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    arm: str,
    error: int | None,
) -> None:
    with Engine.load(tiny_dir, arm=arm, memory_budget=budget(tiny_dir, 7, arm=arm)) as engine:
        expected = ids(engine, prompts[2])
        for calls in (0, 40, 200, 350, 500):
            with monkeypatch.context() as patch:
                patch.setattr(os, "preadv", Failing(calls, error))
                with pytest.raises(Edge0Error, match=PLACE):
                    ids(engine, prompts[2], tokens=40)
            assert ids(engine, prompts[2]) == expected
        assert engine.stats()["dropped_experts"] == 0


def test_a_file_truncated_while_serving_fails_the_request_and_not_the_engine(
    own_dir: Path, budget: Callable[..., float], prompts: list[list[int]]
) -> None:
    shard = own_dir / "model.safetensors"
    content = shard.read_bytes()
    with Engine.load(own_dir, memory_budget=budget(own_dir, 1)) as engine:
        expected = ids(engine, prompts[2], tokens=4)
        os.truncate(shard, len(content) // 8)
        with pytest.raises(Edge0Error, match=PLACE):
            ids(engine, prompts[2], tokens=4)
        shard.write_bytes(content)
        assert ids(engine, prompts[2], tokens=4) == expected
    assert engine.stats()["dropped_experts"] == 0


def complement(path: Path, start: int, stop: int) -> None:
    """Turn every bit of these bytes, in place."""
    with path.open("r+b") as file:
        file.seek(start)
        content = file.read(stop - start)
        file.seek(start)
        file.write(bytes(byte ^ 0xFF for byte in content))


def test_a_file_overwritten_while_serving_fails_requests_until_it_is_restored(
    own_dir: Path, budget: Callable[..., float], prompts: list[list[int]]
) -> None:
    shard = own_dir / "model.safetensors"
    content = shard.read_bytes()
    with Engine.load(own_dir, memory_budget=budget(own_dir, 5)) as engine:
        expected = ids(engine, prompts[2])
        steps = engine.generate(prompts[2], max_tokens=6, ignore_eos=True)
        assert [next(steps).token, next(steps).token] == expected[:2]
        complement(shard, len(content) // 2, len(content))
        with pytest.raises(Edge0Error, match=rf"{shard}: written to.* {len(content)} bytes, last written .*Restore it"):
            next(steps)
        for _ in range(2):
            with pytest.raises(Edge0Error, match=rf"{shard}: written to.*another base now: restore it"):
                ids(engine, prompts[2])
        shard.write_bytes(content)
        assert ids(engine, prompts[2]) == expected
        assert engine.stats()["dropped_experts"] == 0


def test_a_write_that_the_fingerprint_does_not_see_fails_one_request(
    own_dir: Path, budget: Callable[..., float], prompts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """Then the file is served as a fresh engine would serve it, which knows no more either."""
    with Engine.load(own_dir, memory_budget=budget(own_dir, 24)) as engine:
        before = ids(engine, prompts[2], tokens=20)
        for tensor in (tensor for layer in engine.model.store.tensors.values() for tensor in layer):
            if tensor.part == "weight":  # 4,096 bytes an expert, as many as the fingerprint sees at either end
                stop = tensor.start + (engine.model.store.num_experts - 1) * tensor.nbytes
                complement(tensor.path, tensor.start + tensor.nbytes, stop)
        with pytest.raises(Edge0Error, match="written to while it is served"):
            ids(engine, prompts[2])
        after = ids(engine, prompts[2], tokens=20)
        assert "its experts are read again" in caplog.text
        assert after == ids(engine, prompts[2], tokens=20) != before
    with Engine.load(own_dir, memory_budget=budget(own_dir, 24)) as engine:
        assert ids(engine, prompts[2], tokens=20) == after


def test_a_write_harms_no_engine_that_holds_all_experts_until_it_has_to_read_them_again(
    own_dir: Path, budget: Callable[..., float], prompts: list[list[int]]
) -> None:
    shard, gib = own_dir / "model.safetensors", budget(own_dir, 5)
    size = shard.stat().st_size
    with Engine.load(own_dir) as engine:
        expected = ids(engine, prompts[2])
        complement(shard, size - 1, size)
        for says in ("written to while it is served", "another base now"):
            assert ids(engine, prompts[2]) == expected
            with pytest.raises(Edge0Error, match=says):
                engine.set_memory_budget(gib)
        complement(shard, size - 1, size)
        engine.set_memory_budget(gib)
        assert ids(engine, prompts[2]) == expected


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_file_deleted_or_replaced_while_open_is_still_the_one_that_was_loaded(
    own_dir: Path, budget: Callable[..., float], prompts: list[list[int]], how: str
) -> None:
    shard = own_dir / "model.safetensors"
    with Engine.load(own_dir, memory_budget=budget(own_dir, 1)) as engine:
        expected = ids(engine, prompts[2])
        if how == "deleted":
            shard.unlink()
        else:
            other = own_dir / "other"
            other.write_bytes(bytes(shard.stat().st_size))
            other.replace(shard)
        assert ids(engine, prompts[2]) == expected


@pytest.mark.parametrize("damage", ["deleted", "truncated"])
def test_a_damaged_directory_is_refused_before_anything_is_read(own_dir: Path, damage: str) -> None:
    shard = own_dir / "model.safetensors"
    if damage == "deleted":
        shard.unlink()
    else:
        os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(Edge0Error, match=r"model.*safetensors"):
        Engine.load(own_dir)
    assert io_threads() == []


def test_no_thread_stays_behind(
    tiny_dir: Path, budget: Callable[..., float], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threading.active_count()
    engine = Engine.load(tiny_dir, memory_budget=budget(tiny_dir, 4), io_threads=8)
    assert len(io_threads()) == 8
    ids(engine, prompts[1])
    steps = engine.generate(prompts[2], max_tokens=6, ignore_eos=True)
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", Failing(20, errno.EIO))
        with pytest.raises(Edge0Error):
            ids(engine, prompts[2])
    engine.set_memory_budget(budget(tiny_dir, 2))
    assert len(io_threads()) == 8
    engine.close()
    engine.close()
    assert io_threads() == [] and threading.active_count() == before
    # a load that fails after the threads began
    with monkeypatch.context() as patch:
        patch.setattr("edge0_runtime.loading.evaluate", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Engine.load(tiny_dir)
    assert threading.active_count() == before


def test_an_engine_that_is_forgotten_ends_its_threads(tiny_dir: Path) -> None:
    engine = Engine.load(tiny_dir)
    assert io_threads()
    reader = engine.model.memory._reader  # type: ignore[union-attr]
    workers = [thread for thread in threading.enumerate() if thread.name.startswith("edge0-io")]
    reader._finalizer()  # what Python calls when the reader goes
    assert not any(worker.is_alive() for worker in workers)
    engine.close()


@pytest.mark.parametrize("where", ["taken out", "not handed over"])
def test_an_interrupt_midway_in_bookkeeping_loses_no_load_for_good(
    tiny_dir: Path, budget: Callable[..., float], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Ctrl-C between two statements: the request ends, nobody waits for ever, and the next one computes the same."""
    with Engine.load(tiny_dir, memory_budget=budget(tiny_dir, 3)) as engine:
        expected = ids(engine, prompts[2])
        name, owner = ("_finish", SlotPool) if where == "taken out" else ("submit", Reader)
        original, calls = getattr(owner, name), 0

        def interrupted(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 9:
                raise KeyboardInterrupt
            return original(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                ids(engine, prompts[2])
        assert calls >= 9
        assert ids(engine, prompts[2]) == expected
    assert io_threads() == []


def test_sigterm_in_the_middle_of_a_generation_ends_it_cleanly(
    tiny_dir: Path, budget: Callable[..., float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    calls = 0

    def terminating(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 400:
            os.kill(os.getpid(), signal.SIGTERM)
        return PREADV(fd, buffers, offset)

    gib = budget(tiny_dir, 2)
    monkeypatch.setattr(os, "preadv", terminating)
    arguments = ["generate", str(tiny_dir), "--prompt-ids", "5,6", "--max-tokens", "200", "--ignore-eos"]
    assert cli.main([*arguments, "--memory-budget", str(gib)]) == 128 + signal.SIGTERM
    assert io_threads() == []
    assert signal.getsignal(signal.SIGTERM) is handler
