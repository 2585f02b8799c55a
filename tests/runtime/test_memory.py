"""What is held and what isn't: rows of the embedding, packed adapters, keys and values, activations."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from benchmarks.budgets import budget_for
from edge0_runtime import network
from edge0_runtime.activations import context_bytes, token_bytes
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.strict_safetensors import read_header
from edge0_runtime.embedding import StreamedEmbedding
from edge0_runtime.engine import Engine
from edge0_runtime.experts.store import ExpertStore, ExpertTensor
from edge0_runtime.heads import Heads
from edge0_runtime.libraries import make_prompt_cache
from edge0_runtime.model import Model
from edge0_runtime.sequence import Sequence
from tests.mlx_memory import mlx_bytes
from tests.random_adapters import random_heads, write_adapters
from tests.runtime.conftest import CONTEXT, TIER, write_base

ROWS, WIDTH = 40, 128
IDS = mx.array([[7, 0, 39, 7, 12]])


@pytest.fixture(scope="module")
def untied_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with an output layer of its own."""
    directory = tmp_path_factory.mktemp("untied")
    write_base(directory, tied=False)
    write_adapters(directory, TIER)
    return directory


@pytest.fixture
def streamed(untied_dir: Path) -> float:
    """GiB in which 20 of the 32 experts fit."""
    with Engine.load(untied_dir) as engine:
        return budget_for(engine.model, 20) / 2**30


def answer(engine: Engine, count: int = 6) -> list[np.ndarray]:
    prompt = np.random.default_rng(1).integers(3, 384, 50).tolist()
    return [token.logits for token in engine.generate(prompt, max_tokens=count, ignore_eos=True, trace=True)]


# -- rows of the embedding -------------------------------------------------------------------------------------------------


def on_disk(table: nn.Module, path: Path) -> ExpertStore:
    """A store with no experts whose embedding is the module's table."""
    arrays = {name: value for name, value in table.items() if isinstance(value, mx.array)}
    mx.save_safetensors(str(path), arrays, {"format": "mlx"})
    header = read_header(path)
    parts = [part for part in ("weight", "scales", "biases") if part in header.entries]
    entries = [header.entries[part] for part in parts]
    tensors = tuple(
        ExpertTensor(
            "embedding", part, entry.dtype, entry.shape[1:], path, entry.start, (entry.end - entry.start) // ROWS
        )
        for part, entry in zip(parts, entries, strict=True)
    )
    return ExpertStore({}, 0, embedding=tensors, vocabulary=ROWS)


@pytest.mark.parametrize("float32", [False, True])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_rows_from_the_disk_are_those_of_mlx(tmp_path: Path, bits: int | None, dtype: mx.Dtype, float32: bool) -> None:
    """Packed or not, in the dtype of the file or in float32, read one by one or held."""
    mx.random.seed(3)
    table = nn.Embedding(ROWS, WIDTH)
    table.set_dtype(dtype)
    resident = table if bits is None else table.to_quantized(group_size=64, bits=bits)
    store = on_disk(resident, tmp_path / "table.safetensors")
    if float32:
        resident.set_dtype(mx.float32)
    wanted = resident(IDS)
    other = nn.Embedding(ROWS, WIDTH) if bits is None else nn.QuantizedEmbedding(ROWS, WIDTH, group_size=64, bits=bits)
    module = StreamedEmbedding(other, store, float32)
    for _ in ("read", "from the rows that are there"):
        rows = module(IDS)
        assert rows.dtype == wanted.dtype and mx.array_equal(rows, wanted)
        assert network.network_nbytes(module) == 0
    module.hold()
    assert mx.array_equal(module(IDS), wanted) and network.network_nbytes(module) == network.network_nbytes(resident)
    module.release()
    assert mx.array_equal(module(IDS[:, :1]), wanted[:, :1])
    store.close()


def test_a_file_of_rows_that_changes_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "table.safetensors"
    store = on_disk(nn.Embedding(ROWS, WIDTH), path)
    module = StreamedEmbedding(nn.Embedding(ROWS, WIDTH), store, float32=True)
    before = module(IDS)
    content = bytearray(path.read_bytes())
    content[-4 * WIDTH * ROWS :] = bytes(4 * WIDTH * ROWS)
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    with pytest.raises(Edge0Error, match="written to while it is served"):
        store.check()
    module.forget()
    assert not mx.array_equal(module(IDS), before) and not module(IDS).any()
    os.truncate(path, 100)
    module.forget()
    with pytest.raises(
        Edge0Error, match=r"table.safetensors: reading embedding.weight at offset \d+ failed: wanted 512"
    ):
        module(IDS)
    store.close()


def test_rows_are_read_where_experts_are_too_and_held_where_all_are(untied_dir: Path, streamed: float) -> None:
    """The same bits, arms and modes; a budget that changes between requests changes it."""
    with Engine.load(untied_dir) as full, Engine.load(untied_dir, memory_budget=streamed) as engine:
        embedding = engine.model.parts.embed
        assert full.model.parts.embed.held and full.model.plan.embedding_held
        assert not embedding.held and not engine.model.plan.embedding_held and engine.model.plan.slots == 20
        assert "rows of the embedding" in engine.model.plan.text() and "rows" not in full.model.plan.text()
        wanted = answer(full)
        assert np.array_equal(answer(engine), wanted)
        engine.set_memory_budget(None)
        assert embedding.held and np.array_equal(answer(engine), wanted)
        for arm in ("on_demand", "lookahead"):
            full.set_arm(arm)
            engine.set_memory_budget(budget_for(engine.model, 20, widened=True) / 2**30)
            engine.set_arm(arm)
            assert not embedding.held and np.array_equal(answer(engine), answer(full))
    with Engine.load(untied_dir, arm="resident") as engine:
        assert engine.model.parts.embed.held and answer(engine)


def test_without_its_embedding_no_budget_holds_all_experts(untied_dir: Path) -> None:
    """A step that is built before its token is known needs the whole table."""
    with Engine.load(untied_dir) as engine:
        plan = engine.model.plan_for(None)
        for missing in range(1, plan.embedding_bytes + plan.widened_bytes + plan.workspace_bytes, 5_000):
            smaller = engine.model.plan_for(plan.budget_bytes - missing)
            assert smaller.embedding_held == (smaller.slots == smaller.experts)


def test_a_new_request_forgets_rows_of_a_file_that_changed(untied_dir: Path, streamed: float, tmp_path: Path) -> None:
    with Engine.load(untied_dir, memory_budget=streamed) as engine:
        answer(engine)
        assert engine.model.parts.embed._row.cache_info().currsize > 0
        engine.forget_experts()
        assert engine.model.parts.embed._row.cache_info().currsize == 0


# -- adapters --------------------------------------------------------------------------------------------------------------


def test_adapters_stay_in_the_files_halves_while_memory_is_scarce(untied_dir: Path, streamed: float) -> None:
    with Engine.load(untied_dir) as full, Engine.load(untied_dir, memory_budget=streamed) as engine:
        assert engine.model.heads.packed and not full.model.heads.packed
        assert 2 * engine.model.heads.nbytes == full.model.heads.nbytes
        name = "language_model.model.layers.0.linear_attn"
        dtypes = [
            dict(model.network.named_modules())[f"{name}.out_proj"].lora_a.dtype for model in (engine.model, full.model)
        ]
        assert dtypes == [mx.float16, mx.float32]


def test_packed_heads_are_cast_one_after_the_other_and_say_the_same() -> None:
    deep = TIER.architecture | {"num_hidden_layers": 12}
    tier = dataclasses.replace(
        TIER, head_width=2**14, architecture=deep, owners=tuple(range(11)), consumers=tuple(range(1, 12))
    )
    tensors = random_heads(tier)
    packed, whole = Heads(tier, tensors, packed=True), Heads(tier, tensors)
    count = len(packed.owners)
    before = {
        name: mx.random.normal(
            (count, tier.hidden_size if name == "hidden" else tier.num_experts), key=mx.random.key(n)
        )
        for n, name in enumerate(("hidden", "routing", "previous"))
    }
    mx.eval(before)
    mx.synchronize()
    mx.clear_cache()
    held = mlx_bytes()
    mx.reset_peak_memory()
    said = packed(before, None)
    mx.eval(said)
    one = 4 * sum(map(math.prod, tier.head_parts.values()))
    assert mx.get_peak_memory() - held < 5 * one, "mlx lets a few wait"
    assert count == 11 and mx.array_equal(said, whole(before, None))
    rows = slice(1, count)
    assert mx.array_equal(packed({name: value[rows] for name, value in before.items()}, None, rows), said[rows])


# -- what a sequence keeps -------------------------------------------------------------------------------------------------


def kept_bytes(model: Model, tokens: int) -> int:
    """Of the caches after a prompt in one chunk."""
    sequence = Sequence(model)
    sequence.prefill(list(range(3, 3 + tokens)), last=False)
    held = sum(entry.nbytes for entry in sequence._kv)
    sequence.close()
    return held


def test_keys_values_and_states_are_counted_as_mlx_lm_allocates_them(untied_dir: Path) -> None:
    with Engine.load(untied_dir) as engine:
        tier = engine.model.tier
        assert kept_bytes(engine.model, 1) == kept_bytes(engine.model, 200) == context_bytes(tier, 1, float32=True)
        assert context_bytes(tier, 11, float32=True) - context_bytes(tier, 1, float32=True) == 10 * token_bytes(
            tier, float32=True
        )
        assert token_bytes(tier, float32=False) == 2 * 2 * 64  # one layer's keys and values of one head
        assert len(make_prompt_cache(engine.model.network)) == 4


def test_a_longer_context_leaves_room_for_fewer_experts(
    untied_dir: Path, streamed: float, caplog: pytest.LogCaptureFixture
) -> None:
    slots = {}
    for context in (1, 200):
        with Engine.load(untied_dir, memory_budget=streamed, context=context) as engine:
            plan = engine.model.plan
            assert plan.context == context and f"the context holds {context} tokens; 1,000 more take" in plan.text()
            slots[context] = plan.slots
            with caplog.at_level(logging.WARNING):
                answer(engine)
            said = [
                record.message for record in caplog.records if record.message.startswith("context: longer than the")
            ]
            assert len(said) == (context == 1), said
            caplog.clear()
    assert slots[1] > slots[200]
    with Engine.load(untied_dir) as engine:
        assert engine.model.plan.context == CONTEXT  # not 4096: the model has no more
    with pytest.raises(Edge0Error, match="context: 0 must be at least 1"):
        Engine.load(untied_dir, context=0)


# -- activations -----------------------------------------------------------------------------------------------------------


def test_the_allocator_stays_within_the_budget(untied_dir: Path, streamed: float) -> None:
    """Loading aside: prompts, decoding, and a context that fills up."""
    prompt = np.random.default_rng(2).integers(3, 384, 240).tolist()
    before = mlx_bytes()
    with Engine.load(untied_dir, memory_budget=streamed) as engine:
        mx.reset_peak_memory()
        for _ in engine.generate(prompt, max_tokens=16, ignore_eos=True):
            pass
        assert mx.get_peak_memory() - before <= engine.model.plan.budget_bytes
        assert mx.get_peak_memory() - before > 0.5 * engine.model.plan.budget_bytes


def test_recurrences_take_prompts_in_slices(untied_dir: Path, streamed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same bits; else the states after all tokens would be there together."""
    peaks, logits = {}, {}
    for slice_ in (8, 1000):
        monkeypatch.setattr(network, "SLICE", slice_)
        with Engine.load(untied_dir, memory_budget=streamed) as engine:
            mixer = engine.model.network.layers[0].linear_attn
            logits[slice_] = answer(engine)
            kv = make_prompt_cache(engine.model.network)
            x = mx.random.normal((1, 200, TIER.hidden_size))
            mx.eval(x)
            before = mlx_bytes()
            mx.reset_peak_memory()
            mx.eval(mixer(x, None, kv[0]))
            peaks[slice_] = mx.get_peak_memory() - before
    assert np.array_equal(logits[8], logits[1000])
    assert peaks[8] < peaks[1000] / 2


def test_a_small_budget_takes_prompts_in_smaller_chunks(untied_dir: Path, budget: Callable[..., float]) -> None:
    with Engine.load(untied_dir) as engine:
        least = engine.model.plan_for(budget_for(engine.model, 3, widened=True))
        assert engine.prefill_chunk == engine.model.plan.prefill_chunk == 512
        assert least.prefill_chunk == 32 and least.workspace_bytes < engine.model.plan.workspace_bytes
        engine.set_memory_budget(least.budget_bytes / 2**30)
        assert engine.prefill_chunk == 32
