"""The experts that are in memory: least recently used ones go first, within a budget of bytes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import mlx.core as mx

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.experts.store import ExpertStore

MLX_DTYPES = {"U32": mx.uint32, "BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}


@dataclass(frozen=True)
class Expert:
    """One expert in memory: `arrays` in the order of the layer's `ExpertStore.tensors`."""

    index: int
    arrays: tuple[mx.array, ...]
    nbytes: int


class ExpertCache:
    """A least-recently-used cache in front of the store, keyed by (layer, expert).

    Attributes:
        capacity: how many experts fit at least (the budget over the largest layer's expert).
        hits, misses, evictions: counters since construction.
    """

    def __init__(self, store: ExpertStore, budget_bytes: int) -> None:
        largest = max(store.expert_nbytes(layer) for layer in store.tensors)
        if budget_bytes < largest:
            raise Edge0Error(
                f"memory_budget: {budget_bytes} bytes hold no expert; one takes {largest} bytes"
                f" ({largest / 2**30:.6f} GiB), so give at least that"
            )
        self.store = store
        self.budget_bytes = budget_bytes
        self.capacity = budget_bytes // largest
        self.hits = self.misses = self.evictions = 0
        self.used_bytes = 0
        self._experts: OrderedDict[tuple[int, int], Expert] = OrderedDict()

    def get(self, layer: int, expert: int) -> Expert:
        """The expert, from memory or else from disk.

        Raises Edge0Error when it can't be read; the cache stays valid.
        """
        key = (layer, expert)
        found = self._experts.get(key)
        if found is not None:
            self.hits += 1
            self._experts.move_to_end(key)
            return found
        self.misses += 1
        # Room first: at no time are more than budget_bytes held here.
        self._make_room(self.store.expert_nbytes(layer))
        loaded = self._load(layer, expert)
        self._experts[key] = loaded
        self.used_bytes += loaded.nbytes
        return loaded

    def _make_room(self, nbytes: int) -> None:
        while self.used_bytes + nbytes > self.budget_bytes:
            _, victim = self._experts.popitem(last=False)
            self.used_bytes -= victim.nbytes
            self.evictions += 1

    def _load(self, layer: int, expert: int) -> Expert:
        tensors = self.store.tensors[layer]
        arrays = tuple(mx.zeros(tensor.shape, MLX_DTYPES[tensor.dtype]) for tensor in tensors)
        # Evaluated first, so that each owns memory; then filled in place. No graph knows these arrays yet.
        mx.eval(arrays)
        self.store.read_into(layer, expert, [memoryview(array).cast("B") for array in arrays])  # type: ignore[arg-type]
        return Expert(expert, arrays, self.store.expert_nbytes(layer))
