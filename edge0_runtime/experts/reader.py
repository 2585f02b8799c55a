"""The I/O threads: they read bytes of experts into memory that somebody else owns, and know nothing of MLX.

A lazy MLX array must not be touched by a second thread (docs/parity.md 5), so these get `memoryview`s only. What a
layer waits for goes before what is read ahead; what is read ahead goes in the order in which it was asked for.
"""

from __future__ import annotations

import atexit
import itertools
import queue
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.experts.store import ExpertStore


@dataclass(eq=False)
class Load:
    """Neighbouring experts of a layer on their way into memory.

    Attributes:
        layer, first, buffers: as `ExpertStore.read` takes them.
        slots: where they go, for the one who asked. finished: the queue that takes the load when it is over.
        cancelled: set by the one who asked: don't begin. done: all bytes are there. error: why they aren't.
    """

    layer: int
    first: int
    buffers: Sequence[Sequence[memoryview]]
    slots: Sequence[int]
    finished: queue.SimpleQueue[Load]
    cancelled: bool = False
    done: bool = False
    error: Edge0Error | None = None


@dataclass(order=True)
class _Ticket:
    rank: int
    number: int
    load: Load | None = field(compare=False)


DEMANDED, AHEAD, LAST = range(3)


class Reader:
    """`threads` threads that serve a bounded queue of loads.

    Attributes:
        threads: how many.
    """

    def __init__(self, store: ExpertStore, threads: int, bound: int) -> None:
        """`bound`: most loads that may wait; a load owns a slot, so the number of slots is never exceeded."""
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

    def submit(self, load: Load, *, demanded: bool) -> None:
        """Hand a load to the threads; it comes back through its `finished` queue, whatever happens to it."""
        self._queue.put_nowait(_Ticket(DEMANDED if demanded else AHEAD, next(self._numbers), load))

    def close(self) -> None:
        """End the threads after what they were given; may be called again."""
        self._finalizer()
        atexit.unregister(self._finalizer)


def _stop(tickets: queue.PriorityQueue[_Ticket], workers: Sequence[threading.Thread]) -> None:
    for number, _ in enumerate(workers):
        tickets.put(_Ticket(LAST, number, None))
    for worker in workers:
        worker.join()


def _work(store: ExpertStore, tickets: queue.PriorityQueue[_Ticket]) -> None:
    while (load := tickets.get().load) is not None:
        try:
            if not load.cancelled:
                store.read(load.layer, load.first, load.buffers)
                load.done = True
        except Edge0Error as error:
            load.error = error
        except Exception as error:  # somebody waits for the load: it must come back
            load.error = Edge0Error(f"reading experts of layer {load.layer} failed: {error!r}; this is a bug")
        load.buffers = ()
        load.finished.put(load)
        del load  # or an idle thread would keep it
