"""Bytes of experts: the right ones, read to the end, and a clear error when the disk doesn't give them."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.families import QUANTISED_PARTS
from edge0_runtime.engine import Engine
from edge0_runtime.experts.cache import ExpertCache
from edge0_runtime.experts.store import ExpertStore
from edge0_runtime.model import find_adapters

PREADV = os.preadv


@pytest.fixture
def store(tiny_dir: Path) -> Any:
    tier = find_adapters(tiny_dir, prerouter=True, lora=False, tier_name=None).tier
    opened = ExpertStore.open(Checkpoint.open(tiny_dir), tier)
    yield opened
    opened.close()


def test_every_expert_is_its_slice_of_the_stacked_tensors(tiny_dir: Path, store: ExpertStore) -> None:
    stacked = mx.load(str(tiny_dir / "model.safetensors"))
    cache = ExpertCache(store, store.total_nbytes)
    for layer, tensors in store.tensors.items():
        assert len(tensors) == 9
        for expert in range(store.num_experts):
            for tensor, array in zip(tensors, cache.get(layer, expert).arrays, strict=True):
                name = f"language_model.model.layers.{layer}.mlp.switch_mlp.{tensor.projection}.{tensor.part}"
                assert tensor.part in QUANTISED_PARTS
                assert mx.array_equal(array, stacked[name][expert]).item()
                assert array.dtype == stacked[name].dtype
    assert store.loads == 32
    assert store.bytes_read == store.total_nbytes == cache.used_bytes


def test_short_reads_are_continued(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [bytearray(tensor.nbytes) for tensor in store.tensors[1]]
    store.read_into(1, 5, [memoryview(buffer) for buffer in whole])
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: PREADV(fd, [buffers[0][:100]], offset))
    parts = [bytearray(tensor.nbytes) for tensor in store.tensors[1]]
    store.read_into(1, 5, [memoryview(buffer) for buffer in parts])
    assert parts == whole


def test_a_disk_error_names_file_offset_wanted_and_got(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    tensor = store.tensors[2][0]
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(Edge0Error) as caught:
        ExpertCache(store, store.total_nbytes).get(2, 3)
    message = str(caught.value)
    for part in ("model.safetensors", f"offset {tensor.start + 3 * tensor.nbytes}", f"{tensor.nbytes} bytes", "got 0"):
        assert part in message
    assert "Input/output error" in message


def test_a_file_truncated_while_serving_fails_the_request_and_not_the_engine(
    tiny_dir: Path, tmp_path: Path, prompts: list[list[int]]
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_dir, directory)
    shard = directory / "model.safetensors"
    content = shard.read_bytes()
    one_expert = 20_000 / 2**30
    with Engine.load(directory, memory_budget=one_expert) as engine:
        expected = [step.token for step in engine.generate(prompts[2], max_tokens=4, ignore_eos=True)]
        os.truncate(shard, len(content) // 8)
        with pytest.raises(Edge0Error, match=r"model\.safetensors.*offset \d+.*wanted \d+ bytes.*got \d+"):
            list(engine.generate(prompts[2], max_tokens=4, ignore_eos=True))
        shard.write_bytes(content)
        again = [step.token for step in engine.generate(prompts[2], max_tokens=4, ignore_eos=True)]
    assert again == expected
    assert engine.stats()["dropped_experts"] == 0


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


def test_the_least_recently_used_expert_goes_first(store: ExpertStore) -> None:
    cache = ExpertCache(store, 2 * store.expert_nbytes(0))
    for expert in (0, 1, 0, 2, 0, 1):
        cache.get(0, expert)
    # 2 pushes out 1 and not 0, which was used since; then 1 pushes out 2
    assert (cache.hits, cache.misses, cache.evictions) == (2, 4, 2)
    assert cache.used_bytes <= cache.budget_bytes


def test_a_failed_read_leaves_the_cache_usable(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ExpertCache(store, 2 * store.expert_nbytes(0))
    cache.get(0, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda *_: 0)
        with pytest.raises(Edge0Error):
            cache.get(0, 1)
    used = cache.used_bytes
    assert np.array(cache.get(0, 1).arrays[0]).any()
    assert cache.used_bytes == used + store.expert_nbytes(0)


def test_a_budget_below_one_expert_is_refused(store: ExpertStore) -> None:
    with pytest.raises(Edge0Error, match="memory_budget"):
        ExpertCache(store, store.expert_nbytes(0) - 1)


def test_a_closed_store_says_so(store: ExpertStore) -> None:
    store.close()
    with pytest.raises(Edge0Error, match="closed"):
        ExpertCache(store, store.total_nbytes).get(0, 0)
