"""Slots: who gets one, who keeps one, and that reading ahead, waiting and failing never mix up experts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.experts.pool import SlotPool
from edge0_runtime.experts.reader import Reader, runs
from edge0_runtime.experts.store import ExpertStore

PREADV = os.preadv
EXPERTS = 8


def nothing() -> None:
    pass


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Reads wait until it is set."""
    opened = threading.Event()

    def waiting(*args: object) -> int:
        assert opened.wait(60)
        return PREADV(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", waiting)
    yield opened
    opened.set()


@pytest.fixture(scope="module")
def stacked(tiny_dir: Path) -> dict[str, mx.array]:
    return mx.load(str(tiny_dir / "model.safetensors"))


def assert_holds(pool: SlotPool, store: ExpertStore, stacked: dict[str, mx.array], layer: int, expert: int) -> None:
    """What the gather kernel would take for this expert is the checkpoint's slice."""
    slot = int(np.array(pool.locate(layer, mx.array([expert])))[0])
    for tensor, array in zip(store.tensors[layer], pool.weights(layer), strict=True):
        name = f"language_model.model.layers.{layer}.mlp.switch_mlp.{tensor.projection}.{tensor.part}"
        assert mx.array_equal(array[slot], stacked[name][expert].astype(array.dtype)).item(), (layer, expert)


def test_a_long_random_walk_keeps_every_expert_right(
    make_pool: Callable[..., SlotPool], store: ExpertStore, stacked: dict[str, mx.array]
) -> None:
    """Staged, demanded, evicted, abandoned in every order, against a plain model of what is asked for."""
    rng = np.random.default_rng(1)
    pool = make_pool(11, spare=2)
    for step in range(300):
        ahead = [(layer, rng.permutation(EXPERTS)[:2]) for layer in range(4) if rng.random() < 0.5]
        if ahead:
            pool.want([layer for layer, _ in ahead], np.stack([experts for _, experts in ahead]))
        for layer in range(4):
            if rng.random() < 0.2:
                pool.want([layer], rng.permutation(EXPERTS)[None, :2], soon=True)
            staged = [experts for owner, experts in ahead if owner == layer]
            experts = staged[0] if staged and rng.random() < 0.9 else rng.permutation(EXPERTS)[: rng.integers(1, 4)]
            pool.acquire(layer, experts, nothing)
            for expert in experts:
                assert_holds(pool, store, stacked, layer, int(expert))
            if rng.random() < 0.3:
                pool.release()
        if step % 50 == 49:
            pool.abandon()
        pool.release()
    assert pool.evictions > 300 and pool.hits > 300 and pool.held <= 11
    assert pool.bytes_read == pool.loads * store.expert_nbytes(0)


def test_the_least_recently_used_expert_goes_first(make_pool: Callable[..., SlotPool]) -> None:
    pool = make_pool(2)
    for expert in (0, 1, 0, 2, 0, 1):
        pool.acquire(0, np.array([expert]), nothing)
        pool.release()
    # 2 pushes out 1 and not 0, which was used since; then 1 pushes out 2
    assert (pool.hits, pool.misses, pool.evictions) == (2, 4, 2)


def test_an_expert_that_nobody_foresees_is_kept_longer(make_pool: Callable[..., SlotPool]) -> None:
    pool = make_pool(3)
    pool.acquire(0, np.array([0]), nothing)  # layer 0 has its own gate, layer 1 is predicted
    pool.release()
    for expert in range(8):
        pool.acquire(1, np.array([expert]), nothing, foreseen=True)
        pool.release()
    assert pool.present(0, np.array([0])).all() and pool.present(1, np.array([6, 7])).all()
    for step in range(20 * 4):  # layers x passes later it is as old as the others
        pool.acquire(1, np.array([step % 8]), nothing, foreseen=True)
        pool.release()
    assert not pool.present(0, np.array([0])).any()


def test_slots_in_use_are_settled_before_they_are_overwritten(
    make_pool: Callable[..., SlotPool], store: ExpertStore, stacked: dict[str, mx.array]
) -> None:
    pool = make_pool(2)
    pool.acquire(0, np.array([3, 4]), nothing)
    settled = []

    def settle() -> None:
        if not settled:
            assert_holds(pool, store, stacked, 0, 3)  # the graph that needs it can still be evaluated
            assert_holds(pool, store, stacked, 0, 4)
        settled.append(True)

    pool.acquire(1, np.array([3]), settle)
    assert settled
    assert_holds(pool, store, stacked, 1, 3)
    assert not pool.present(0, np.array([3, 4])).all()


def test_no_settling_where_all_is_there(make_pool: Callable[..., SlotPool]) -> None:
    pool = make_pool(4)
    pool.acquire(0, np.array([1, 2]), nothing)
    pool.release()
    pool.acquire(0, np.array([2, 1]), lambda: pytest.fail("nothing to wait for"))
    assert (pool.hits, pool.misses, pool.late) == (2, 2, 2)


def test_reading_ahead_returns_at_once_and_is_waited_for_where_it_is_needed(
    make_pool: Callable[..., SlotPool], gate: threading.Event, store: ExpertStore, stacked: dict[str, mx.array]
) -> None:
    pool = make_pool(6)
    pool.want([1, 2], np.array([[3, 4], [0, 7]]))
    assert pool.loads == 0 and pool.held == 4
    pool.acquire(1, np.array([4, 3]), gate.set)
    assert_holds(pool, store, stacked, 1, 3)
    assert_holds(pool, store, stacked, 1, 4)
    assert pool.late == 0 and pool.misses == 2 and pool.blocked_seconds > 0


def test_reading_ahead_leaves_room_for_who_must_wait(make_pool: Callable[..., SlotPool]) -> None:
    pool = make_pool(5, spare=2)
    pool.want([1, 2, 3], np.array([[0, 1], [2, 3], [4, 5]]))
    assert pool.held == 3
    assert pool.present(2, np.array([2, 3])).sum() == 1
    pool.acquire(0, np.array([6, 7]), nothing)
    assert pool.present(1, np.array([0, 1])).all()  # no reservation was broken
    # its slots are used until the graph is evaluated; then what is still wanted goes on
    assert not pool.present(3, np.array([4, 5])).any()
    pool.release()
    pool.acquire(1, np.array([0, 1]), nothing)
    pool.release()
    assert pool.present(2, np.array([2, 3])).all()


def test_a_layer_that_must_have_room_breaks_reservations(make_pool: Callable[..., SlotPool]) -> None:
    pool = make_pool(4)
    pool.want([2, 3], np.array([[0, 1], [2, 3]]))
    assert pool.held == 4
    pool.acquire(0, np.array([5, 6, 7]), nothing)
    assert pool.present(0, np.array([5, 6, 7])).all()
    pool.release()
    pool.acquire(2, np.array([0, 1]), nothing)  # read again where it went
    assert pool.present(2, np.array([0, 1])).all()


def test_what_is_demanded_is_read_first_and_what_the_next_layer_may_need_before_what_is_ahead(
    store: ExpertStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[tuple[int, int]] = []
    first_taken, go = threading.Event(), threading.Event()

    def read(layer: int, first: int, buffers: object, between: object, part: slice) -> None:
        first_taken.set()
        assert go.wait(60)
        order.append((layer, first))

    monkeypatch.setattr(store, "read", read)
    one = Reader(store, threads=1, bound=64)
    pool = SlotPool(store, one, tuple(store.tensors), 8, 0, True)
    pool.want([1, 2], np.array([[0], [0]]))
    assert first_taken.wait(60)
    pool.want([3], np.array([[7]]), soon=True)
    pool.acquire(0, np.array([5]), go.set)
    pool.acquire(2, np.array([0]), nothing)
    one.close()
    assert order == [(1, 0), *[(0, 5)] * 3, (3, 7), (2, 0)]  # the demanded one by projections


def test_what_waits_for_room_lets_the_next_layer_go_first(
    make_pool: Callable[..., SlotPool], gate: threading.Event
) -> None:
    pool = make_pool(4)
    pool.want([1, 2, 3], np.array([[0, 1], [0, 1], [0, 1]]))  # layer 3 finds no room
    pool.want([0], np.array([[4, 5]]), soon=True)
    gate.set()
    pool.acquire(1, np.array([0, 1]), nothing)
    pool.release()  # two slots; those of layer 2 are reserved
    assert pool.present(0, np.array([4, 5])).all() and not pool.present(3, np.array([0, 1])).any()


def test_what_is_demanded_interrupts_what_is_ahead_between_two_ranges(
    store: ExpertStore, stacked: dict[str, mx.array], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread, in the middle of an expert that is read ahead: the demanded one is complete before that goes on."""
    offsets: list[int] = []
    begun, go = threading.Event(), threading.Event()

    def waiting(fd: int, buffers: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        if len(offsets) == 3:
            begun.set()
            assert go.wait(60)
        return PREADV(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", waiting)
    one = Reader(store, threads=1, bound=64)
    pool = SlotPool(store, one, tuple(store.tensors), 8, 0, True)
    pool.want([1], np.array([[0]]))
    assert begun.wait(60)
    pool.acquire(0, np.array([5]), go.set)
    assert_holds(pool, store, stacked, 0, 5)
    pool.acquire(1, np.array([0]), nothing)
    assert_holds(pool, store, stacked, 1, 0)
    one.close()
    starts = [
        [tensor.start + expert * tensor.nbytes for tensor in store.tensors[layer]] for layer, expert in ((1, 0), (0, 5))
    ]
    assert offsets == [*starts[0][:3], *starts[1], *starts[0][3:]]


def test_after_abandon_nobody_reads_and_what_was_asked_for_is_forgotten(
    make_pool: Callable[..., SlotPool], gate: threading.Event, store: ExpertStore, stacked: dict[str, mx.array]
) -> None:
    pool = make_pool(20)
    pool.want([0, 1, 2], np.stack([np.arange(0, 8, 2)] * 3))
    gate.set()
    pool.abandon()
    assert pool.loads + (12 - pool.held) == 12  # the others weren't begun
    for layer in range(3):
        pool.acquire(layer, np.arange(EXPERTS), nothing)
        for expert in range(EXPERTS):
            assert_holds(pool, store, stacked, layer, expert)
        pool.release()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_failed_read_leaves_the_pool_usable(
    make_pool: Callable[..., SlotPool],
    store: ExpertStore,
    stacked: dict[str, mx.array],
    monkeypatch: pytest.MonkeyPatch,
    ahead: bool,
) -> None:
    pool = make_pool(3)
    pool.acquire(0, np.array([0]), nothing)
    pool.release()
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda *_: 0)
        if ahead:
            pool.want([0], np.array([[1, 2]]))
        with pytest.raises(Edge0Error, match=r"wanted \d+ bytes, got 0"):
            pool.acquire(0, np.array([1, 2]), nothing)
        pool.abandon()
    assert pool.held == 1
    pool.acquire(0, np.array([0, 1, 2]), nothing)
    for expert in range(3):
        assert_holds(pool, store, stacked, 0, expert)


def test_an_error_ahead_that_nobody_needs_is_no_error(
    make_pool: Callable[..., SlotPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda *_: 0)
        pool.want([0], np.array([[1, 2]]))
        pool.abandon()
    pool.acquire(1, np.array([1]), nothing)
    assert pool.held == 1


@pytest.mark.parametrize("float32", [True, False])
def test_a_full_pool_is_in_order_and_stays(
    make_pool: Callable[..., SlotPool], store: ExpertStore, stacked: dict[str, mx.array], float32: bool
) -> None:
    pool = make_pool(4 * EXPERTS, float32=float32)
    pool.fill()
    assert {array.dtype for array in pool.arrays} == {mx.uint32, mx.float32 if float32 else mx.bfloat16}
    assert pool.nbytes == sum(array.nbytes for array in pool.arrays)
    assert pool.full and pool.loads == 0  # counters begin after it
    for layer in range(4):
        for expert in range(EXPERTS):
            assert_holds(pool, store, stacked, layer, expert)


def test_runs_of_neighbours() -> None:
    def lengths(*experts: int) -> list[int]:
        return [end - start for start, end in runs(np.array(experts, dtype=int))]

    assert lengths() == []
    assert lengths(4) == [1]
    assert lengths(1, 2, 4, 7, 8, 9) == [2, 1, 3]
    assert lengths(*range(20)) == [8, 8, 4]
