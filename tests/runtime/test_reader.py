"""Reading threads: they end with their owner, and they widen what they read exactly."""

from __future__ import annotations

import dataclasses
import queue
import threading

import mlx.core as mx
import numpy as np
import pytest

from edge0_runtime.experts.reader import Load, Reader, _fill
from edge0_runtime.experts.store import ExpertStore


def test_threads_end_with_the_reader_and_with_its_owner(store: ExpertStore) -> None:
    def io_threads() -> int:
        return sum(thread.name.startswith("edge0-io") for thread in threading.enumerate())

    before = io_threads()
    reader = Reader(store, threads=8, bound=4)
    assert io_threads() == before + 8
    reader.close()
    reader.close()
    assert io_threads() == before
    forgotten = Reader(store, threads=3, bound=4)
    assert io_threads() == before + 3
    forgotten.close()
    del forgotten
    assert io_threads() == before


def test_half_precision_is_widened_exactly(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every finite fp16 and bf16 number, as mlx casts it."""
    patterns = np.arange(2**16, dtype=np.uint16)
    scales = store.tensors[0][1]
    for dtype, kind in (("F16", mx.float16), ("BF16", mx.bfloat16)):
        tensor = dataclasses.replace(scales, dtype=dtype, nbytes=2**17)
        monkeypatch.setattr(store, "tensors", {0: (tensor,)})
        monkeypatch.setattr(
            store,
            "read",
            lambda layer, first, buffers, between, part: buffers[0][0].__setitem__(..., patterns.view("u1")),
        )
        target = np.zeros(2**16, np.float32)
        _fill(store, Load(0, 0, [[target]], [0], queue.SimpleQueue()), slice(None), lambda: None)
        wanted = np.array(mx.array(patterns).view(kind).astype(mx.float32))
        finite = np.isfinite(wanted)
        assert np.array_equal(target[finite], wanted[finite]) and not np.isfinite(target[~finite]).any()
