"""The token embedding: held in memory, or its rows read from the checkpoint's own files as tokens need them.

It takes the place of mlx-lm's module and computes with that very module; only its table may be the rows that are asked for, so
the result is bit-equal to the resident one's. N distinct ids of a call, D hidden size.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from edge0_runtime.experts.pool import MLX_DTYPES
from edge0_runtime.experts.store import ExpertStore

HOT_ROWS = 1024


class StreamedEmbedding(nn.Module):
    """Drop-in for an embedding that no output layer shares: ids [...] -> [..., D].

    Attributes:
        held: the whole table is in memory, and ids may be lazy. Else they are evaluated at the call.
    """

    def __init__(self, inner: nn.Module, store: ExpertStore, float32: bool) -> None:
        """`inner` is mlx-lm's module, whose table isn't read yet. `float32`: the dtype of the results, whatever the file's."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner = inner
        self._store, self._float32 = store, float32
        self._row = lru_cache(HOT_ROWS)(self._read_row)
        self.release()

    def hold(self) -> None:
        """Read the whole table. Raises Edge0Error when it can't be read."""
        if self.held:
            return
        for tensor in self._store.embedding:
            table = mx.zeros((self._store.vocabulary, *tensor.shape), MLX_DTYPES[tensor.dtype])
            mx.eval(table)
            self._store.read_rows(tensor, 0, np.frombuffer(memoryview(table).cast("B"), np.uint8))  # type: ignore[arg-type]
            self.inner[tensor.part] = self._widened(table)
            mx.eval(self.inner[tensor.part])
        self.held = True
        self.forget()

    def release(self) -> None:
        """Hold no table any more."""
        for tensor in self._store.embedding:
            self.inner.pop(tensor.part, None)
        self.held = False

    def forget(self) -> None:
        """What was read of single rows may not be what the files hold now."""
        self._row.cache_clear()

    def __call__(self, ids: mx.array) -> mx.array:
        """The ids' rows. Raises Edge0Error when they can't be read."""
        if self.held:
            held: mx.array = self.inner(ids)
            return held
        ids_N, places = np.unique(np.array(ids), return_inverse=True)
        rows_N = [self._row(int(token)) for token in ids_N]
        for tensor, parts_N in zip(self._store.embedding, zip(*rows_N, strict=True), strict=True):
            rows = mx.array(np.stack(parts_N)).view(MLX_DTYPES[tensor.dtype]).reshape(-1, *tensor.shape)
            self.inner[tensor.part] = self._widened(rows)
        read: mx.array = self.inner(mx.array(places.reshape(ids.shape)))
        self.release()
        return read

    def _read_row(self, token: int) -> tuple[np.ndarray, ...]:
        """A row's bytes, by tensor."""
        parts = tuple(np.empty(tensor.nbytes, np.uint8) for tensor in self._store.embedding)
        for tensor, part in zip(self._store.embedding, parts, strict=True):
            self._store.read_rows(tensor, token, part)
        return parts

    def _widened(self, rows: mx.array) -> mx.array:
        return rows.astype(mx.float32) if self._float32 and mx.issubdtype(rows.dtype, mx.floating) else rows
