"""The I/O threads: they read bytes of experts into memory that somebody else owns, and know nothing of MLX.

A lazy MLX array must not be touched by a second thread (docs/streaming.md "One memory"), so these get plain memory only. What a
layer waits for goes before what is read ahead, and interrupts it between two ranges; several threads share the projections of
each expert of it, so that one that is missing alone gets more than its share of a busy disk. What is read ahead goes in the
order in which it was asked for, the next layer's first.
"""

from __future__ import annotations

import atexit
import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.families import PROJECTIONS, QUANTISED_PARTS
from edge0_runtime.experts.store import ExpertStore

IO_THREADS, MAX_IO_THREADS = 4, 64  # the default, and the most that may be asked for


@dataclass(eq=False)
class Load:
    """Neighbouring experts of a layer on their way into memory.

    Attributes:
        layer, first: neighbours from this expert on.
        targets: for each tensor of the layer, memory for every expert: bytes as they are on disk, or float32 values
            to which bf16 or fp16 ones are widened (the low halves of their memory are zero, then and later).
        slots: where they go, for the one who asked. finished: the queue that takes the load when it is over.
        cancelled: set by the one who asked: don't begin. done: all bytes are there. error: why they aren't.
        pending: parts that aren't over yet.
    """

    layer: int
    first: int
    targets: Sequence[Sequence[np.ndarray]]
    slots: Sequence[int]
    finished: queue.SimpleQueue[Load]
    cancelled: bool = False
    done: bool = False
    error: Edge0Error | None = None
    pending: int = 0


@dataclass(order=True)
class _Ticket:
    rank: int
    number: int
    load: Load | None = field(compare=False)
    part: slice = field(compare=False)  # of the load, among the layer's tensors


EVERY = slice(None)
BY_PROJECTION = tuple(
    slice(start, start + len(QUANTISED_PARTS))
    for start in range(0, len(PROJECTIONS) * len(QUANTISED_PARTS), len(QUANTISED_PARTS))
)
LONGEST_RUN = 8  # neighbours in one load; more would leave the other threads idle
DEMANDED, SOON, AHEAD, LAST = range(4)
PENDING = threading.Lock()  # of every load's `pending`


class Reader:
    """`threads` threads that serve a bounded queue of loads.

    Attributes:
        threads: how many.
    """

    def __init__(self, store: ExpertStore, threads: int, bound: int) -> None:
        """`bound`: most loads that may wait; a load owns a slot, so the number of slots is never exceeded."""
        bound *= len(BY_PROJECTION)
        self.threads = threads
        self._numbers = itertools.count()
        self._queue: queue.PriorityQueue[_Ticket] = queue.PriorityQueue(bound + threads)
        workers = [
            threading.Thread(target=_work, args=(store, self._queue), name=f"edge0-io-{n}", daemon=True)
            for n in range(threads)
        ]
        for worker in workers:
            worker.start()
        # Also when the owner is forgotten or the interpreter ends: a thread must not write into freed memory.
        self._finalizer = weakref.finalize(self, _stop, self._queue, workers)
        atexit.register(self._finalizer)

    def submit(self, load: Load, rank: int) -> None:
        """Hand a load to the threads; it comes back through its `finished` queue, whatever happens to it.

        `rank`: DEMANDED if somebody waits for it, SOON if the next layer may need it, AHEAD if a later one does.
        """
        parts = BY_PROJECTION if rank == DEMANDED else (EVERY,)
        load.pending = len(parts)
        for part in parts:
            self._queue.put_nowait(_Ticket(rank, next(self._numbers), load, part))

    def drain(self) -> None:
        """Return when every load that was handed over is over."""
        self._queue.join()

    def close(self) -> None:
        """End the threads after what they were given; may be called again."""
        self._finalizer()
        atexit.unregister(self._finalizer)


def _stop(tickets: queue.PriorityQueue[_Ticket], workers: Sequence[threading.Thread]) -> None:
    for number, _ in enumerate(workers):
        tickets.put(_Ticket(LAST, number, None, EVERY))
    for worker in workers:
        worker.join()


def _work(store: ExpertStore, tickets: queue.PriorityQueue[_Ticket]) -> None:
    while (ticket := tickets.get()).load is not None:
        _serve(store, ticket, partial(_serve_before, store, tickets, ticket.rank))
        del ticket  # or an idle thread would keep it
        tickets.task_done()
    tickets.task_done()


def _serve_before(store: ExpertStore, tickets: queue.PriorityQueue[_Ticket], rank: int) -> None:
    """Between two ranges of a load of `rank`: serve what is more urgent.

    Whoever waits for bytes waits for one range of each thread's at most, not for the experts that are read ahead.
    """
    while tickets.queue and tickets.queue[0].rank < rank:  # only a hint: others take tickets meanwhile
        try:
            ticket = tickets.get_nowait()
        except queue.Empty:
            return
        if ticket.rank >= rank or ticket.load is None:
            tickets.put(ticket)
            tickets.task_done()
            return
        _serve(store, ticket, partial(_serve_before, store, tickets, ticket.rank))
        tickets.task_done()


def _serve(store: ExpertStore, ticket: _Ticket, between: Callable[[], None]) -> None:
    load, error = ticket.load, None
    assert load is not None
    try:
        if not load.cancelled:
            _fill(store, load, ticket.part, between)
    except Edge0Error as failed:
        error = failed
    except Exception as failed:  # somebody waits for the load: it must come back
        error = Edge0Error(f"reading experts of layer {load.layer} failed: {failed!r}; this is a bug")
    with PENDING:
        load.error = load.error or error
        load.pending -= 1
        if load.pending:
            return
    load.done = load.error is None and not load.cancelled
    load.targets = ()
    load.finished.put(load)


def _fill(store: ExpertStore, load: Load, part: slice, between: Callable[[], None]) -> None:
    """Bytes go straight into their place; values to be widened make a stop."""
    buffers: list[Sequence[np.ndarray]] = []
    widened: list[tuple[str, np.ndarray, np.ndarray]] = []
    for tensor, targets in zip(store.tensors[load.layer][part], load.targets[part], strict=True):
        if targets[0].dtype == np.uint8:
            buffers.append(targets)
            continue
        buffers.append([np.empty(tensor.nbytes, np.uint8) for _ in targets])
        widened += [(tensor.dtype, *pair) for pair in zip(buffers[-1], targets, strict=True)]
    store.read(load.layer, load.first, buffers, between, part)
    for dtype, source, target in widened:
        if dtype == "BF16":  # a bf16 number is the high half of the same float32 number
            target.view(np.uint16)[1::2] = source.view(np.uint16)
        else:
            target[:] = source.view(np.float16)


def runs(experts_N: np.ndarray) -> list[tuple[int, int]]:
    """Bounds of the runs of neighbours in rising indices, none longer than LONGEST_RUN."""
    bounds, start = [], 0
    for end in range(1, len(experts_N) + 1):
        if end == len(experts_N) or experts_N[end] != experts_N[end - 1] + 1 or end - start == LONGEST_RUN:
            bounds.append((start, end))
            start = end
    return bounds
