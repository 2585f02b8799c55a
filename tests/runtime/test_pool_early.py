"""What is read early, for the step after this one: who has to make room for whom."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from edge0_runtime.experts.pool import SlotPool
from edge0_runtime.experts.reader import Reader


def nothing() -> None:
    pass


def test_what_is_read_early_takes_only_slots_that_this_step_is_done_with(make_pool: Callable[..., SlotPool]) -> None:
    """A pool of exactly one step: layers 0 to 3 with two experts each."""
    pool = make_pool(8)
    pool.want([0, 1, 2, 3], np.array([[0, 1], [0, 1], [0, 1], [0, 1]]))
    for layer in (0, 1):
        pool.acquire(layer, np.array([0, 1]), nothing, foreseen=True)
    pool.want([1], np.array([[1, 5]]), early=True)
    assert not pool.present(1, np.array([5])).any()  # layer 1 still computes with its own, layers 2 and 3 will
    pool.acquire(2, np.array([0, 1]), nothing, foreseen=True)
    pool.release(below=2)
    assert pool.present(1, np.array([1, 5])).all() and not pool.present(1, np.array([0])).any()
    for layer in (0, 2, 3):  # of layer 0 and 2 nobody has said yet what they need next
        assert pool.present(layer, np.array([0, 1])).all()
    pool.acquire(3, np.array([0, 1]), nothing, foreseen=True)
    assert pool.late == 0 and pool.evictions == 1


def test_what_this_step_needs_takes_slots_of_what_was_read_early(
    make_pool: Callable[..., SlotPool], reader: Reader
) -> None:
    pool = make_pool(6)
    pool.want([1, 2, 3], np.array([[0, 1], [0, 1], [0, 1]]), early=True)
    reader.drain()
    pool.want([2], np.array([[4, 5]]))
    assert pool.present(2, np.array([4, 5])).all() and not pool.present(1, np.array([0, 1])).any()
    pool.acquire(0, np.array([6, 7]), nothing)  # not even asked for
    assert not pool.present(2, np.array([0, 1])).any()
    pool.acquire(2, np.array([4, 5]), nothing, foreseen=True)
    assert pool.present(3, np.array([0, 1])).all() and pool.late == 2


def test_what_was_read_early_goes_after_all_that_is_free(make_pool: Callable[..., SlotPool], reader: Reader) -> None:
    """Also where it was used longer ago: layers on their own gates keep theirs for many passes."""
    pool = make_pool(4)
    pool.acquire(0, np.array([0, 1]), nothing)
    pool.release()
    pool.want([2], np.array([[0, 1]]), early=True)
    reader.drain()
    pool.want([1], np.array([[3, 4]]), soon=True)
    assert pool.present(1, np.array([3, 4])).all() and not pool.present(0, np.array([0, 1])).any()
    assert pool.present(2, np.array([0, 1])).all()


def test_what_is_there_and_needed_again_next_time_goes_before_what_this_step_needs(
    make_pool: Callable[..., SlotPool],
) -> None:
    pool = make_pool(2)
    pool.acquire(1, np.array([0, 1]), nothing, foreseen=True)
    pool.release()
    pool.want([1], np.array([[0, 1]]), early=True)
    pool.want([2], np.array([[0, 1]]))
    assert pool.present(2, np.array([0, 1])).all()


def test_what_was_read_early_and_is_not_wanted_when_the_step_begins_is_free(
    make_pool: Callable[..., SlotPool], reader: Reader
) -> None:
    pool = make_pool(4)
    pool.want([1, 2, 3], np.array([[0, 1], [0, 1], [0, 1]]), early=True)  # layer 3 finds no room
    reader.drain()
    pool.turn()
    pool.want([2], np.array([[0, 1]]))
    pool.want([3], np.array([[2, 3]]), early=True)
    assert pool.present(2, np.array([0, 1])).all() and pool.present(3, np.array([2, 3])).all()
    assert not pool.present(3, np.array([0, 1])).any() and not pool.present(1, np.array([0, 1])).any()


@pytest.mark.parametrize("count", [2, 3])
def test_slots_are_free_of_layers_that_are_computed_and_of_no_others(
    make_pool: Callable[..., SlotPool], count: int
) -> None:
    pool, experts_N = make_pool(4), np.arange(count)
    pool.acquire(1, np.array([0, 1]), nothing)
    pool.acquire(2, np.array([0, 1]), nothing)
    pool.release(below=2)
    given: list[bool] = []
    pool.acquire(3, experts_N, lambda: given.append(bool(pool.present(3, experts_N).any())))
    assert given[0] == (count == 2)  # the wait for bytes comes after that; for a third slot layer 2 has to be computed
    assert not pool.present(1, np.array([0, 1])).any()
