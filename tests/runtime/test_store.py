"""Bytes of experts: the right ones, read to the end, and a clear error when the disk doesn't give them."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path

import mlx.core as mx
import pytest

from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.families import QUANTISED_PARTS
from edge0_runtime.experts.pool import MLX_DTYPES
from edge0_runtime.experts.store import ExpertStore
from edge0_runtime.serving import find_adapters

PREADV = os.preadv


def read_expert(store: ExpertStore, layer: int, expert: int) -> list[bytearray]:
    buffers = [bytearray(tensor.nbytes) for tensor in store.tensors[layer]]
    store.read(layer, expert, [[memoryview(buffer)] for buffer in buffers])
    return buffers


def test_every_expert_is_its_slice_of_the_stacked_tensors(tiny_dir: Path, store: ExpertStore) -> None:
    stacked = mx.load(str(tiny_dir / "model.safetensors"))
    for layer, tensors in store.tensors.items():
        assert len(tensors) == 9
        for expert in range(store.num_experts):
            for tensor, content in zip(tensors, read_expert(store, layer, expert), strict=True):
                name = f"language_model.model.layers.{layer}.mlp.switch_mlp.{tensor.projection}.{tensor.part}"
                assert tensor.part in QUANTISED_PARTS
                assert content == memoryview(mx.contiguous(stacked[name][expert])).cast("B")
                assert MLX_DTYPES[tensor.dtype] == stacked[name].dtype
    assert store.total_nbytes == 32 * sum(map(len, read_expert(store, 0, 0)))


def test_neighbours_are_read_in_one_go(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [read_expert(store, 1, expert) for expert in (3, 4, 5)]
    together = [[bytearray(tensor.nbytes) for _ in alone] for tensor in store.tensors[1]]
    calls = []
    monkeypatch.setattr(os, "preadv", lambda *args: calls.append(args) or PREADV(*args))
    store.read(1, 3, [[memoryview(buffer) for buffer in parts] for parts in together])
    assert len(calls) == 9
    assert [list(expert) for expert in zip(*together, strict=True)] == alone


@pytest.mark.parametrize("most", [1, 100, 4096])
def test_short_reads_are_continued(store: ExpertStore, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    whole = [read_expert(store, 1, expert) for expert in (5, 6)]

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        return PREADV(fd, [buffers[0][:most]], offset)

    def across(fd: int, buffers: list[memoryview], offset: int) -> int:
        """Ends in the middle of the second buffer."""
        return PREADV(fd, [buffers[0], *(buffer[: len(buffer) // 2] for buffer in buffers[1:])], offset)

    for partial in (short, across):
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", partial)
            parts = [[bytearray(tensor.nbytes) for _ in whole] for tensor in store.tensors[1]]
            store.read(1, 5, [[memoryview(buffer) for buffer in pair] for pair in parts])
        assert [list(expert) for expert in zip(*parts, strict=True)] == whole


def test_a_disk_error_names_file_offset_wanted_and_got(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    tensor = store.tensors[2][0]
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(Edge0Error) as caught:
        read_expert(store, 2, 3)
    message = str(caught.value)
    for part in ("model.safetensors", f"offset {tensor.start + 3 * tensor.nbytes}", f"{tensor.nbytes} bytes", "got 0"):
        assert part in message
    assert "Input/output error" in message


def test_all_wrong_expert_tensors_are_listed_at_once(tiny_dir: Path, store: ExpertStore) -> None:
    tier = find_adapters(tiny_dir, prerouter=True, lora=False, tier_name=None).tier
    checkpoint = Checkpoint.open(tiny_dir)
    names = [tier.layout.expert_tensors(1, "up_proj", part)[0] for part in QUANTISED_PARTS]
    entries = dict(checkpoint.entries)
    del entries[names[0]]
    for name, wrong in ((names[1], {"dtype": "U8"}), (names[2], {"shape": (7, 128, 1)})):
        header, entry = entries[name]
        entries[name] = (header, dataclasses.replace(entry, **wrong))
    with pytest.raises(Edge0Error) as caught:
        ExpertStore.open(dataclasses.replace(checkpoint, entries=entries), tier)
    for text in (f"{names[0]} is missing", f"{names[1]} has dtype U8", f"{names[2]} has shape [7, 128, 1]"):
        assert text in str(caught.value)


def test_a_closed_store_says_so(store: ExpertStore) -> None:
    store.close()
    with pytest.raises(Edge0Error, match="closed"):
        read_expert(store, 0, 0)
