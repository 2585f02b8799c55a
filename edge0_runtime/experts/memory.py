"""All slot pools of a model and what is known about the running step: who reads ahead for which layer.

Pools hold layers of equal expert shapes; most models have one. T tokens, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.experts.pool import SlotPool
from edge0_runtime.experts.reader import Reader
from edge0_runtime.experts.store import ExpertStore
from edge0_runtime.routing import RoutingLog

# A guess is read where such guesses were mostly right of late: a wrong one costs the disk what a right one saves in waiting.
LEAST_ACCURACY = 0.5
ACCURACY_RATE = 0.1
COUNTERS = ("loads", "bytes_read", "hits", "misses", "late", "evictions", "blocked_seconds")


class ExpertMemory:
    """The experts of one model in memory, and the reads that are on their way.

    Attributes:
        store: where they come from. layers: the MoE layers, in order. slots: how many experts fit.
        whole_layers: the running pass uses nearly every expert of every layer (a long chunk of a prompt), so each
            layer's are read while the one before computes.
    """

    def __init__(
        self, store: ExpertStore, threads: int, slots: int, spare: int, float32: bool, log: RoutingLog
    ) -> None:
        """`slots` in all; `spare` and `float32` as for a `SlotPool`."""
        self.store = store
        self.layers = tuple(sorted(store.tensors))
        self.slots = slots
        self.whole_layers = False
        self._log = log
        self._staged: dict[int, np.ndarray] = {}  # layer -> its experts in the coming step, known beforehand
        self._routed: dict[int, tuple[np.ndarray, mx.array]] = {}  # layer -> those, and what its block chose
        self._guessed: dict[int, np.ndarray] = {}  # layer -> what it was guessed to choose in this step
        self._accuracy = dict.fromkeys(self.layers, 1.0)  # share of guessed experts that were chosen, lately
        self._every_E = np.arange(store.num_experts)
        self._reader = Reader(store, threads, slots)
        self._pool = {layer: pool for pool in self._make_pools(slots, spare, float32) for layer in pool.layers}
        self.pools = tuple(dict.fromkeys(self._pool.values()))
        for pool in self.pools:
            if pool.slots == len(pool.layers) * store.num_experts:
                pool.fill()

    def _make_pools(self, slots: int, spare: int, float32: bool) -> list[SlotPool]:
        """One pool for each kind of expert, with a share by its layers."""
        kinds: dict[tuple[object, ...], list[int]] = {}
        for layer in self.layers:
            shapes = tuple((tensor.dtype, tensor.shape) for tensor in self.store.tensors[layer])
            kinds.setdefault(shapes, []).append(layer)
        if slots < len(kinds):
            raise Edge0Error(f"memory_budget: it holds {slots} experts; this model needs at least {len(kinds)}")
        pools, left, layers_left = [], slots, len(self.layers)
        for layers in kinds.values():
            share = max(1, left * len(layers) // layers_left)
            share = min(share, len(layers) * self.store.num_experts)
            pools.append(SlotPool(self.store, self._reader, layers, share, spare, float32))
            left, layers_left = left - share, layers_left - len(layers)
        return pools

    def pool(self, layer: int) -> SlotPool:
        """The pool that the layer's experts are in."""
        return self._pool[layer]

    # -- reading ahead ---------------------------------------------------------------------------------------

    def stage(self, layers: Sequence[int], experts_LK: np.ndarray) -> None:
        """These ARE the experts of the coming step in these layers: read them, and don't wait for their routers."""
        self._staged.update(zip(layers, experts_LK, strict=True))
        self.want(layers, experts_LK)

    def want(self, layers: Sequence[int], experts_LK: np.ndarray, *, soon: bool = False) -> None:
        """These may be the experts of these layers: read them, and before what else is wanted if `soon`."""
        for pool in self.pools:
            if not pool.full and (rows := [row for row, layer in enumerate(layers) if self._pool[layer] is pool]):
                pool.want([layers[row] for row in rows], experts_LK[rows], soon=soon)

    def guess(self, layers: Sequence[int], experts_LK: np.ndarray, *, soon: bool = False) -> None:
        """As `want`, for layers that will choose themselves; what they choose is told to `chosen`."""
        for layer, experts_K in zip(layers, experts_LK, strict=True):
            self._guessed[layer] = experts_K
            if self._accuracy[layer] >= LEAST_ACCURACY:
                self.want([layer], experts_K[None], soon=soon)

    def chosen(self, layer: int, experts_N: np.ndarray) -> None:
        """A layer has chosen its experts: how good was the guess, if there was one?"""
        guessed_K = self._guessed.pop(layer, None)
        if guessed_K is not None:
            right = float(np.isin(guessed_K, experts_N).mean())
            self._accuracy[layer] += ACCURACY_RATE * (right - self._accuracy[layer])

    def begin(self, *, whole_layers: bool) -> None:
        """A forward pass begins."""
        self.whole_layers = whole_layers
        if whole_layers:
            self.want(self.layers[:1], self._every_E[None])

    def look_ahead(self, layer: int, expected_1K: np.ndarray | None) -> None:
        """`layer` has its experts; while it computes, those of the next one are read: with whole layers all, else
        `expected_1K`."""
        index = self.layers.index(layer) + 1
        following = self.layers[index : index + 1]
        if self.whole_layers and following:
            self.want(following, self._every_E[None], soon=True)
        elif expected_1K is not None:
            self.guess(following, expected_1K, soon=True)

    def take_staged(self, layer: int, indices: mx.array) -> np.ndarray | None:
        """The layer's experts in this step if they were known before, [K]; `indices` is what its block chose, lazily."""
        known_K = self._staged.pop(layer, None)
        if known_K is not None:
            self._routed[layer] = (known_K, indices)
        return known_K

    # -- the end of a step -----------------------------------------------------------------------------------

    def settled(self) -> None:
        """Everything built so far is evaluated.

        Raises RuntimeError if a block chose an expert that was not staged for it: the step's result is wrong then.
        """
        routed, self._routed = self._routed, {}
        for layer, (known_K, indices) in routed.items():
            dropped = int(np.isin(np.array(indices), known_K, invert=True).sum())
            if dropped:
                self._log.dropped += dropped
                raise RuntimeError(f"layer {layer}: {dropped} routed experts were not staged")
        for pool in self.pools:
            pool.release()

    def abandon(self) -> None:
        """Forget what was asked for; nothing is read afterwards, and no graph may be pending."""
        self._staged.clear()
        self._routed.clear()
        self._guessed.clear()
        self.whole_layers = False
        for pool in self.pools:
            pool.abandon()

    def forget(self) -> None:
        """Hold no expert any more, where not all are held for good, and nothing learnt about guesses."""
        self._accuracy = dict.fromkeys(self.layers, 1.0)
        for pool in self.pools:
            pool.forget()

    def counters(self) -> dict[str, float]:
        """COUNTERS over all pools, and the experts held."""
        return {name: sum(getattr(pool, name) for pool in self.pools) for name in (*COUNTERS, "held")}

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(pool.nbytes for pool in self.pools)

    def close(self) -> None:
        """End the I/O threads; may be called again."""
        self.abandon()
        self._reader.close()
