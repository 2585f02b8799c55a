"""Slots: the one place in memory where experts are, read into by the I/O threads and computed from in place.

A pool is nine arrays [slots, out, in/8 or in/64], and a table that says which slot holds which expert of which
layer. The gather kernel takes its experts from these very arrays by slot number, so an expert that was read ahead, one
that is still there from an earlier token, and one that a layer had to wait for are computed by the same kernel on the
same memory: policy (who is read when, who goes) never touches the result. All methods belong to one thread; only the
bytes of slots that nothing uses are written by others.

Shapes: S slots, N experts of one request, L layers, E experts per layer.
"""

from __future__ import annotations

import math
import queue
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from edge0_runtime.experts.reader import AHEAD, DEMANDED, SOON, Load, Reader, runs
from edge0_runtime.experts.store import FLOATS, ExpertStore, ExpertTensor

MLX_DTYPES = {"U32": mx.uint32, "BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}
KEPT_PASSES = 20  # docs/streaming.md "One memory"


class SlotPool:
    """`slots` slots for the experts of `layers`, which all have the same shapes; the least recently used goes first.

    A slot can't be given away while it is loading, while a graph that is not evaluated yet computes from it ("used"),
    or while it is reserved for a layer that comes later in the step. A reservation is a hint: a layer that must have
    a slot breaks it, and the later layer reads again. What is held for the step after this one ("early") makes room for
    all that this step needs.

    Attributes:
        arrays: the weights, in the order of `ExpertStore.tensors`. slots: how many experts fit.
        full: every expert of every layer is there for good, in order, so that nobody has to ask (`fill`).
        nbytes: of all slots. expert_nbytes: of one expert on disk.
        loads, bytes_read: experts that were read, and their bytes.
        hits, misses: experts that a layer computed with and that were there from earlier, or were read for it.
        late: misses that were not even asked for before the layer needed them.
        evictions: experts that went. blocked_seconds: time that the computing thread waited for bytes.
        reads: (layer, first expert, how many) of every load that arrived, while somebody wants to know; else None.
    """

    def __init__(
        self, store: ExpertStore, reader: Reader, layers: Sequence[int], slots: int, spare: int, float32: bool
    ) -> None:
        """Make the slots.

        Args:
            spare: slots that reading ahead leaves to layers that can't know their experts in advance.
            float32: keep scales and biases in float32. Beside float32 activations mlx's gather would else cast
                those of the whole pool in every call: 107 ms instead of 12 with 500 slots.
        """
        self.layers = tuple(layers)
        self.slots = slots
        self.full = False
        self.expert_nbytes = store.expert_nbytes(layers[0])
        self.nbytes = slots * slot_nbytes(store.tensors[layers[0]], float32)
        self._num_experts = store.num_experts
        self._tensors = store.tensors[layers[0]]
        self.arrays = tuple(mx.zeros((slots, *tensor.shape), slot_dtype(tensor, float32)) for tensor in self._tensors)
        # Evaluated first, so that each owns memory; no graph depends on a value of theirs that is written later.
        mx.eval(self.arrays)
        # The same memory; rows of bytes as on disk, or of values that get wider.
        self._memory = []
        for array, tensor in zip(self.arrays, self._tensors, strict=True):
            kind = np.uint8 if array.nbytes == slots * tensor.nbytes else np.float32
            self._memory.append(np.frombuffer(memoryview(array).cast("B"), kind).reshape(slots, -1))  # type: ignore[arg-type]
        self._reader = reader
        self._spare = min(spare, slots)
        self._row = {layer: row for row, layer in enumerate(self.layers)}
        self._lookup = [mx.zeros(self._num_experts, mx.uint32) for _ in layers]
        mx.eval(self._lookup)
        self._written = [np.array(table, copy=False) for table in self._lookup]  # the same memory
        self._slot_LE = np.full((len(layers), self._num_experts), -1, np.int64)
        self._row_S = np.full(slots, -1, np.int64)  # whose expert a slot holds
        self._expert_S = np.full(slots, -1, np.int64)
        self._clock_S = np.zeros(slots, np.int64)  # last use
        self._loading_S, self._used_S, self._reserved_S, self._early_S, self._fresh_S = np.zeros((5, slots), bool)
        self._time = 0
        # (row, experts, rank) that wait for room, of this step and of the one after it
        self._wants: deque[tuple[int, np.ndarray, int]] = deque()
        self._early_wants: deque[tuple[int, np.ndarray, int]] = deque()
        self._outstanding: set[Load] = set()
        self._finished: queue.SimpleQueue[Load] = queue.SimpleQueue()
        self.reads: list[tuple[int, int, int]] | None = None
        self.reset_counters()

    def reset_counters(self) -> None:
        """Set to 0 all that `COUNTERS` of experts/memory.py names; what is held stays."""
        self.loads = self.bytes_read = self.hits = self.misses = self.late = self.evictions = 0
        self.blocked_seconds = 0.0

    @property
    def held(self) -> int:
        """How many slots hold an expert or await one."""
        return int((self._row_S >= 0).sum())

    # -- what a layer computes with --------------------------------------------------------------------------

    def weights(self, layer: int) -> tuple[mx.array, ...]:
        """What the layer's gather takes its experts from: the pool, or where that is full its own part of it."""
        if not self.full:
            return self.arrays
        first = self._row[layer] * self._num_experts
        return tuple(array[first : first + self._num_experts] for array in self.arrays)

    def locate(self, layer: int, indices: mx.array) -> mx.array:
        """Experts' positions in `weights`, lazily: the table is read when the graph is evaluated."""
        return indices if self.full else self._lookup[self._row[layer]][indices]

    def acquire(self, layer: int, experts_N: np.ndarray, settle: Callable[[], None], *, foreseen: bool = False) -> None:
        """Return when all of `experts_N` (distinct, at most `slots`) are there; they stay until `release`.

        Args:
            foreseen: the layer's experts are known a step ahead, now and next time. To lose one of these costs bytes,
                to lose another one a wait, so the others are kept KEPT_PASSES passes longer.
            settle: evaluates everything that computes from slots acquired before; called only where the layer has to
                wait or needs their room, so that the wait that is counted is for bytes and for nothing else.

        Raises Edge0Error when an expert can't be read.
        """
        row = self._row[layer]
        self._time += 1
        self._collect()
        if self._wants:
            self._wants = deque(want for want in self._wants if want[0] != row)
        slots_N = self._slot_LE[row, experts_N]
        missing_N = slots_N < 0
        if missing_N.any():
            absent = experts_N[missing_N]
            self.late += len(absent)
            self._issue(row, absent, self._room(len(absent), slots_N[~missing_N], settle), DEMANDED)
            slots_N = self._slot_LE[row, experts_N]
        self._used_S[slots_N] = True
        if self._loading_S[slots_N].any():
            self._wait(slots_N, settle)
        own_S = self._row_S == row
        self._reserved_S[own_S] = self._early_S[own_S] = False
        self._early_S[slots_N] = foreseen  # until it is known which of them the layer needs again
        fresh = int(self._fresh_S[slots_N].sum())
        self._fresh_S[slots_N] = False
        self.misses += fresh
        self.hits += len(experts_N) - fresh
        self._clock_S[slots_N] = self._time + (0 if foreseen else KEPT_PASSES * len(self.layers))
        self._read_ahead()

    def release(self, below: int | None = None) -> None:
        """All graphs that compute from acquired slots, or from those of layers `below`, are evaluated or given up."""
        layers = len(self.layers) if below is None else bisect_left(self.layers, below)
        self._used_S[self._row_S < layers] = False
        self._read_ahead()

    def present(self, layer: int, experts_N: np.ndarray) -> np.ndarray:
        """Which of the experts are in memory or on their way: bool [N]."""
        here_N: np.ndarray = self._slot_LE[self._row[layer], experts_N] >= 0
        return here_N

    def age(self) -> None:
        """A prompt begins: all that is here goes before anything that the prompt will leave."""
        self._clock_S -= self._clock_S.max() + self._num_experts

    def rank(self, layer: int, worth_E: np.ndarray) -> None:
        """The prompt is done with the layer: of all that it leaves, each layer's least worth go first."""
        slots_N = np.flatnonzero(self._row_S == self._row[layer])
        self._clock_S[slots_N] = -np.argsort(np.argsort(-worth_E, kind="stable"))[self._expert_S[slots_N]]

    # -- reading ahead ---------------------------------------------------------------------------------------

    def want(self, layers: Sequence[int], experts_LN: np.ndarray, *, soon: bool = False, early: bool = False) -> None:
        """Read these experts of later layers, in this order, as far as there is room; returns at once.

        `soon` is for the layer that comes next: before all that was asked for earlier. `early` is for the step after this
        one, of layers that have acquired their experts of this one, and leaves all slots to this one that it needs.
        """
        self._time += not early  # the clock counts layers of passes, by which some experts are kept longer
        rows_L = np.array([self._row[layer] for layer in layers])
        slots_LN = self._slot_LE[rows_L[:, None], experts_LN]
        here_LN = slots_LN >= 0
        if early:
            self._early_S[np.isin(self._row_S, rows_L)] = False
        held_S = self._early_S if early else self._reserved_S
        held_S[slots_LN[here_LN]] = True
        wants = [
            (int(rows_L[index]), experts_LN[index, ~here_LN[index]], SOON if soon else AHEAD)
            for index in np.flatnonzero(~here_LN.all(axis=1))
        ]
        if soon:
            self._wants.extendleft(wants[::-1])
        else:
            (self._early_wants if early else self._wants).extend(wants)
        self._read_ahead()

    def turn(self) -> None:
        """A step begins: of what was read early for it, that is reserved which is wanted now."""
        self._early_wants.clear()
        self._early_S[:] = False

    def _read_ahead(self) -> None:
        for wants, held_S in ((self._wants, self._reserved_S), (self._early_wants, self._early_S)):
            if not wants:
                continue
            self._collect()
            room = self._free(early=held_S is self._reserved_S)[: -self._spare or None]
            while wants:
                row, experts_N, rank = wants.popleft()
                experts_N = experts_N[self._slot_LE[row, experts_N] < 0]
                now, later = experts_N[: len(room)], experts_N[len(room) :]
                if len(now):
                    self._issue(row, now, room[: len(now)], rank)
                    held_S[room[: len(now)]] = True
                    room = room[len(now) :]
                if len(later):
                    wants.appendleft((row, later, rank))
                    return

    def fill(self) -> None:
        """Read all experts of all layers, in order; needs a slot for each. From then on the pool is `full`."""
        every_E = np.arange(self._num_experts)
        for row in range(len(self.layers)):
            first = row * self._num_experts
            self._issue(row, every_E, every_E + first, AHEAD)
        for layer in self.layers:
            self.acquire(layer, every_E, lambda: None)
            self.release()
        self.full = True
        self.reset_counters()

    def abandon(self) -> None:
        """Give up all that was asked for; afterwards no thread reads for this pool, and what arrived stays."""
        self._wants.clear()
        self._early_wants.clear()
        for load in self._outstanding:
            load.cancelled = True
        # Not by waiting for each in the queue: Ctrl-C may have struck when one had been taken out or was not handed over yet.
        self._reader.drain()
        self._collect()
        for load in tuple(self._outstanding):
            self._finish(load)
        self._used_S[:] = self._reserved_S[:] = self._early_S[:] = False

    def forget(self) -> None:
        """Hold no expert any more, unless the pool is full for good; also when bookkeeping was interrupted midway."""
        self.abandon()
        if not self.full:
            self._slot_LE[:] = self._row_S[:] = self._expert_S[:] = -1
            self._clock_S[:] = 0
            self._loading_S[:] = self._fresh_S[:] = False

    # -- slots -----------------------------------------------------------------------------------------------

    def _free(self, *, early: bool) -> np.ndarray:
        """Slots that may be given away, the one to go first in front; `early`: behind them what is held for the next step."""
        taken_S = self._loading_S | self._used_S | self._reserved_S
        free = np.flatnonzero(~taken_S if early else ~(taken_S | self._early_S))
        return free[np.lexsort((self._clock_S[free], self._early_S[free]))]

    def _room(self, count: int, keep_N: np.ndarray, settle: Callable[[], None]) -> np.ndarray:
        """`count` slots for a layer that needs them now, none of them in `keep_N`."""
        self._used_S[keep_N] = True
        if len(free := self._free(early=False)) < count:
            settle()
            self._used_S[:] = False
            self._used_S[keep_N] = True
            free = self._free(early=True)
        if len(free) < count:  # reading ahead took too much
            self._reserved_S[:] = False
            free = self._free(early=True)
        while len(free) < count:
            self._finish(self._finished.get())
            free = self._free(early=True)
        return free[:count]

    def _issue(self, row: int, experts_N: np.ndarray, slots_N: np.ndarray, rank: int) -> None:
        """Give the slots to the experts and have them read."""
        held_N = slots_N[self._row_S[slots_N] >= 0]
        self._slot_LE[self._row_S[held_N], self._expert_S[held_N]] = -1
        self.evictions += len(held_N)
        order = np.argsort(experts_N)
        experts_N, slots_N = experts_N[order], slots_N[order]
        self._slot_LE[row, experts_N] = slots_N
        self._written[row][experts_N] = slots_N
        self._row_S[slots_N], self._expert_S[slots_N] = row, experts_N
        self._clock_S[slots_N] = self._time
        self._early_S[slots_N] = False
        self._loading_S[slots_N] = self._fresh_S[slots_N] = True
        for start, end in runs(experts_N):
            slots = slots_N[start:end].tolist()
            targets = [[memory[slot] for slot in slots] for memory in self._memory]
            load = Load(self.layers[row], int(experts_N[start]), targets, slots, self._finished)
            self._outstanding.add(load)
            self._reader.submit(load, rank)

    def _wait(self, slots_N: np.ndarray, settle: Callable[[], None]) -> None:
        settle()
        self._used_S[:] = False
        self._used_S[slots_N] = True
        self._read_ahead()
        began = time.perf_counter()
        try:
            while self._loading_S[slots_N].any():
                load = self._finished.get()
                self._finish(load)
                if load.error is not None and np.isin(load.slots, slots_N).any():
                    raise load.error
        finally:
            self.blocked_seconds += time.perf_counter() - began

    def _collect(self) -> None:
        """Take over what has arrived since."""
        while not self._finished.empty():
            self._finish(self._finished.get())

    def _finish(self, load: Load) -> None:
        self._outstanding.discard(load)
        self._loading_S[load.slots] = False
        if load.done:
            self.loads += len(load.slots)
            self.bytes_read += len(load.slots) * self.expert_nbytes
            if self.reads is not None:
                self.reads.append((load.layer, load.first, len(load.slots)))
            return
        # Nobody may find these; a layer that needs one asks again and gets the error then.
        self._empty(np.array(load.slots))

    def _empty(self, slots_N: np.ndarray) -> None:
        slots_N = slots_N[self._row_S[slots_N] >= 0]
        self._slot_LE[self._row_S[slots_N], self._expert_S[slots_N]] = -1
        self._row_S[slots_N] = self._expert_S[slots_N] = -1
        self._clock_S[slots_N] = 0
        for flag_S in (self._used_S, self._reserved_S, self._early_S, self._fresh_S):
            flag_S[slots_N] = False


def slot_dtype(tensor: ExpertTensor, float32: bool) -> mx.Dtype:
    """In which a slot holds a tensor's values."""
    return mx.float32 if float32 and tensor.dtype in FLOATS else MLX_DTYPES[tensor.dtype]


def slot_nbytes(tensors: Sequence[ExpertTensor], float32: bool) -> int:
    """Memory of one expert; on disk it may take less."""
    return sum(math.prod(tensor.shape) * slot_dtype(tensor, float32).size for tensor in tensors)
