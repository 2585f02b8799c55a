"""All slot pools of a model, and what is read ahead for them.

Pools hold layers of equal expert shapes; most models have one. N experts of a layer, L layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.experts.pool import SlotPool
from edge0_runtime.experts.reader import Reader
from edge0_runtime.experts.store import ExpertStore

# A guess is read where such guesses were mostly right of late: a wrong one costs the disk what a right one saves in waiting.
LEAST_ACCURACY = 0.5
ACCURACY_RATE = 0.1
HALF_LIFE = 16  # tokens, of a prompt's use of an expert; docs/streaming.md "One memory"
COUNTERS = ("loads", "bytes_read", "hits", "misses", "late", "evictions", "blocked_seconds")


class ExpertMemory:
    """The experts of one model in memory, and the reads that are on their way.

    Attributes:
        store: where they come from. layers: the MoE layers, in order. slots: how many experts fit.
        pools: their slots.
    """

    def __init__(self, store: ExpertStore, threads: int, slots: int, spare: int, float32: bool) -> None:
        """`slots` in all; `spare` and `float32` as for a `SlotPool`."""
        self.store = store
        self.layers = tuple(sorted(store.tensors))
        self.slots = slots
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

    @property
    def full(self) -> bool:
        """Whether all experts are in memory for good, so that nobody ever waits for one."""
        return all(pool.full for pool in self.pools)

    # -- reading ahead ---------------------------------------------------------------------------------------

    def want(self, layers: Sequence[int], experts_LK: np.ndarray, *, soon: bool = False, early: bool = False) -> None:
        """Read these experts of these layers, in the order that `SlotPool.want` says; returns at once."""
        for pool in self.pools:
            if not pool.full and (rows := [row for row, layer in enumerate(layers) if self._pool[layer] is pool]):
                pool.want([layers[row] for row in rows], experts_LK[rows], soon=soon, early=early)

    def want_layer(self, layer: int, *, soon: bool = False) -> None:
        """Read all experts of the layer."""
        self.want([layer], self._every_E[None], soon=soon)

    def age(self) -> None:
        """A prompt begins: what is held from before goes first."""
        for pool in self.pools:
            pool.age()

    def rank(self, layer: int, ran_TK: np.ndarray) -> None:
        """A prompt's tokens ran these: what of the layer decoding will need least goes first."""
        self._pool[layer].rank(layer, _worth(ran_TK, self.store.num_experts))

    def after(self, layer: int) -> int | None:
        """The next MoE layer, if there is one."""
        index = self.layers.index(layer) + 1
        return self.layers[index] if index < len(self.layers) else None

    def guess(self, layers: Sequence[int], experts_LK: np.ndarray, *, soon: bool = False, early: bool = False) -> None:
        """As `want`, for layers that will choose themselves; whoever sees what they choose tells `judge`."""
        for layer, experts_K in zip(layers, experts_LK, strict=True):
            if self._accuracy[layer] >= LEAST_ACCURACY:
                self.want([layer], experts_K[None], soon=soon, early=early)

    def judge(self, layer: int, guessed_K: np.ndarray, chosen_N: np.ndarray) -> None:
        """A layer has chosen its experts: how good was the guess?"""
        right = float(np.isin(guessed_K, chosen_N).mean())
        self._accuracy[layer] += ACCURACY_RATE * (right - self._accuracy[layer])

    # -- between steps ---------------------------------------------------------------------------------------

    def release(self, below: int | None = None) -> None:
        """Everything built so far, or of the layers `below`, is evaluated: no graph computes from their slots any more."""
        for pool in self.pools:
            pool.release(below)

    def turn(self) -> None:
        """A step begins: what was read early for it is held only as far as it is wanted again now."""
        for pool in self.pools:
            pool.turn()

    def abandon(self) -> None:
        """Forget what was asked for; nothing is read afterwards, and no graph may be pending."""
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

    def take_reads(self, *, go_on: bool) -> list[tuple[int, int, int]]:
        """(layer, first expert, how many) of the loads that arrived since this was last called; noted from now on if `go_on`."""
        taken = [read for pool in self.pools for read in pool.reads or ()]
        for pool in self.pools:
            pool.reads = [] if go_on else None
        return taken

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(pool.nbytes for pool in self.pools)

    def close(self) -> None:
        """End the I/O threads; may be called again."""
        self.abandon()
        self._reader.close()


def _worth(ran_TK: np.ndarray, num_experts: int) -> np.ndarray:
    """[E], how often each expert was run, a use counting half as much as one HALF_LIFE tokens later."""
    age_T = np.arange(len(ran_TK))[::-1]
    weights_TK = np.broadcast_to(0.5 ** (age_T / HALF_LIFE)[:, None], ran_TK.shape)
    return np.bincount(ran_TK.ravel(), weights_TK.ravel(), minlength=num_experts)
