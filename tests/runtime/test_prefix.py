"""Requests that begin alike: the same bits as without what is known of earlier ones, in a bounded memory."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edge0_runtime.activations import state_bytes, token_bytes
from edge0_runtime.catalog import Catalog, Entry
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import Sticky
from edge0_runtime.engine import Engine
from edge0_runtime.prefix.cuts import SHORTEST, cut
from edge0_runtime.sequence import Sequence
from edge0_runtime.serving import Serving
from edge0_runtime.snapshot import Snapshot, arrays_of
from tests.runtime.conftest import TIER
from tests.runtime.conversations import BEGIN, CHUNK, END, FIRST, REQUESTS, ROOM, SYSTEM, load, steps, turn
from tests.runtime.test_layered_prompts import directories

__all__ = ["directories"]


@pytest.fixture(scope="module")
def make(make_dir: Callable[..., Path], directories: dict[str, Path]) -> Callable[[str], Path]:
    """A directory by what is special about its tier."""

    def directory(kind: str) -> Path:
        if kind == "ling":
            return directories["bailing_moe_v3"]
        if kind == "sticky":
            return make_dir(router=dataclasses.replace(TIER.router, sticky=Sticky(2.0, 2)))
        return make_dir(first_token=kind)

    return directory


@pytest.mark.parametrize(
    ("kind", "flags", "slots"),
    [
        ("gate", {}, 9),
        ("gate", {"prerouter": False}, None),
        ("gate", {"arm": "resident"}, None),
        ("predicted", {}, 9),
        ("predicted", {"lora": False}, None),
        ("sticky", {}, 9),
        ("ling", {}, 9),
        ("ling", {"prerouter": False, "lora": False}, None),
    ],
)
def test_going_on_from_what_is_known_changes_no_bit(
    make: Callable[[str], Path], budget: Callable[..., float], kind: str, flags: dict[str, Any], slots: int | None
) -> None:
    """Tokens, experts and logits; and as much is known as was said. Without it all experts are there, with it as few as said."""
    directory = make(kind)
    room = {} if slots is None else {"memory_budget": budget(directory, slots, **flags) + ROOM}
    with load(directory, **flags) as engine:
        expected = [steps(engine, prompt)[0] for prompt, _ in REQUESTS.values()]
    with load(directory, **flags, **room, prefix_cache=ROOM) as engine:
        for (name, (prompt, known)), wanted in zip(REQUESTS.items(), expected, strict=True):
            assert steps(engine, prompt) == (wanted, known), name
        assert engine.stats()["dropped_experts"] == 0


@pytest.mark.parametrize("kind", ["gate", "ling"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.95, "seed": 11}])
def test_tokens_are_the_same_too_where_steps_are_built_ahead(
    make: Callable[[str], Path], kind: str, sampling: dict[str, Any]
) -> None:
    with load(make(kind)) as engine:
        expected = [steps(engine, prompt, trace=False, **sampling)[0] for prompt, _ in REQUESTS.values()]
    with load(make(kind), prefix_cache=ROOM) as engine:
        found = [steps(engine, prompt, trace=False, **sampling) for prompt, _ in REQUESTS.values()]
    assert found == [(wanted, known) for wanted, (_, known) in zip(expected, REQUESTS.values(), strict=True)]


def test_another_arm_finds_nothing(tiny_dir: Path) -> None:
    prompt = REQUESTS["begin"][0]
    with load(tiny_dir, prefix_cache=ROOM) as engine:
        steps(engine, prompt)
        engine.set_arm("on_demand")
        assert steps(engine, prompt)[1] == 0
        engine.set_arm("prerouter")
        assert steps(engine, prompt)[1] == 70


def test_models_of_one_base_share_the_memory_and_nothing_else(tiny_dir: Path) -> None:
    """Interleaved, each goes on from its own snapshots; a second name of the same files from those of the first."""
    bare = Serving(prerouter=False, lora=False)
    prompts = [REQUESTS[name][0] for name in ("begin", "go on")]
    expected = {}
    for name, flags in {"bare": {"prerouter": False, "lora": False}, "both": {}}.items():
        with load(tiny_dir, **flags) as engine:
            expected[name] = [steps(engine, prompt)[0] for prompt in prompts]
    entries = {"bare": Entry(tiny_dir, bare), "both": Entry(tiny_dir), "again": Entry(tiny_dir)}
    with Catalog.load(entries, prefix_cache=ROOM) as catalog:
        for engine in catalog.values():
            engine.prefill_chunk = engine.prefill_width = CHUNK
        for number, known in enumerate((0, 70)):
            for name in ("bare", "both"):
                assert steps(catalog[name], prompts[number]) == (expected[name][number], known), name
            assert steps(catalog["again"], prompts[number]) == (expected["both"][number], (70, 107)[number])
        held = {engine.stats()["prefix_bytes"] for engine in catalog.values()}
        assert len(held) == 1 and 0 < held.pop() <= catalog["bare"].model.prefix_bytes


@pytest.mark.parametrize("kind", ["predicted", "ling"])
def test_a_text_without_turns_is_known_up_to_its_last_chunk(make: Callable[[str], Path], kind: str) -> None:
    """Where it grows; asked for again, up to its last token, whose heads then see the features of a snapshot."""
    text = [token for token in turn(8, 120) if token != END]
    with load(make(kind)) as engine:
        expected = [steps(engine, text[:n])[0] for n in (100, 100, 119, 1, 2)]
    with load(make(kind), prefix_cache=ROOM) as engine:
        found = [steps(engine, text[:n]) for n in (100, 100, 119, 1, 2)]
    assert found == list(zip(expected, [0, 99, 96, 0, 0], strict=True))


def same(one: Snapshot, other: Snapshot) -> bool:
    """To the bit; their rows may lie in other stretches."""
    left, right = (
        arrays_of([snapshot.rows.whole().parts, snapshot.states, snapshot.features, snapshot.since])
        for snapshot in (one, other)
    )
    assert left and len(left) == len(right)
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("family", ["qwen3_5_moe", "bailing_moe_v3"])
def test_snapshots_of_chunks_that_went_layer_by_layer(
    directories: dict[str, Path], budget: Callable[..., float], family: str
) -> None:
    """Are those of one chunk after the other; what is told apart by this comparison differs at every place."""
    prompt = np.random.default_rng(1).integers(3, 384, size=80).tolist()
    chunks = [prompt[start : start + 20] for start in range(0, 80, 20)]
    taken = []
    for flags in ({}, {"memory_budget": budget(directories[family], 9)}):
        with Engine.load(directories[family], **flags) as engine:
            sequence = Sequence(engine.model)
            snapshots = sequence.prefill_chunks(chunks, threading.Event(), [0, 2, 3])
            assert snapshots is not None
            taken.append(snapshots)
            sequence.close()
    assert [snapshot.tokens for snapshot in taken[0]] == [snapshot.tokens for snapshot in taken[1]] == [20, 60, 80]
    assert all(same(one, other) for one, other in zip(*taken, strict=True))
    assert not same(taken[0][0], taken[0][1])


@pytest.mark.parametrize("kind", ["predicted", "ling"])
def test_memory_is_what_the_plan_says_and_never_more(make: Callable[[str], Path], kind: str) -> None:
    """Eight conversations in room for about two snapshots."""
    with load(make(kind), prefix_cache=ROOM) as engine:
        tier = engine.model.tier
        sequence = Sequence(engine.model)
        (snapshot,) = sequence.prefill_chunks([SYSTEM], threading.Event(), [0]) or []
        sequence.close()
        features = sum(array.nbytes for array in arrays_of([snapshot.features, snapshot.since]))
        said = token_bytes(tier, 30, float32=True) + state_bytes(tier, float32=True)
        assert snapshot.nbytes == said + features
    room = (2 * snapshot.own_nbytes + token_bytes(tier, 100, float32=True)) / 2**30
    with load(make(kind), prefix_cache=room) as engine:
        for seed in range(8):
            steps(engine, [*turn(100 + seed, 40), *turn(200 + seed, 30), *BEGIN])
            stats = engine.stats()
            assert 0 < stats["prefix_bytes"] <= engine.model.prefix_bytes == int(room * 2**30)
        assert stats["prefix_evictions"] > 8 and stats["prefix_snapshots"] == 2
        assert steps(engine, [*turn(107, 40), *turn(207, 30), *BEGIN])[1] == 70  # the last one's are there


def test_snapshots_of_one_conversation_share_their_rows(tiny_dir: Path) -> None:
    with load(tiny_dir, prefix_cache=ROOM) as engine:
        conversation = list(SYSTEM)
        for seed in range(8):
            conversation += turn(seed, 20)
            steps(engine, [*conversation, *BEGIN])
        tier, held = engine.model.tier, engine.stats()
        state = state_bytes(tier, float32=True)
        assert held["prefix_snapshots"] == 9
        features = 9 * 10 * tier.hidden_size * 4
        assert held["prefix_bytes"] <= 9 * state + token_bytes(tier, len(conversation), float32=True) + features


def test_the_least_recently_used_goes_first(tiny_dir: Path) -> None:
    """Not the oldest: a conversation that goes on stays."""
    stays = [*turn(0, 60), *BEGIN]
    with load(tiny_dir, prefix_cache=ROOM) as engine:
        steps(engine, stays)
        one = engine.stats()["prefix_bytes"]
    with load(tiny_dir, prefix_cache=3.5 * one / 2**30) as engine:
        steps(engine, stays)
        for seed in range(1, 9):
            steps(engine, [*turn(seed, 60), *BEGIN])
            assert steps(engine, stays)[1] == 60
        assert steps(engine, [*turn(1, 60), *BEGIN])[1] == 0


def test_a_cancelled_prompt_leaves_what_it_has_got_to(tiny_dir: Path) -> None:
    prompt = REQUESTS["go on"][0]
    with load(tiny_dir) as engine:
        expected = steps(engine, prompt)[0]
    with load(tiny_dir, prefix_cache=ROOM) as engine:
        cancel = threading.Event()
        add = engine.prefixes.add

        def adding(*args: Any) -> None:
            add(*args)
            cancel.set()

        engine.prefixes.add = adding  # type: ignore[method-assign]
        (only,) = engine.generate(prompt, max_tokens=5, cancel=cancel)
        engine.prefixes.add = add  # type: ignore[method-assign]
        assert only.finish_reason == "cancelled"
        assert steps(engine, prompt) == (expected, 30)


def test_another_budget_begins_with_nothing(tiny_dir: Path, budget: Callable[..., float]) -> None:
    prompt = REQUESTS["begin"][0]
    with load(tiny_dir, prefix_cache=ROOM) as engine:
        steps(engine, prompt)
        engine.set_memory_budget(budget(tiny_dir, 9) + ROOM)
        engine.prefill_chunk, engine.prefill_width = CHUNK, 2 * CHUNK
        assert steps(engine, prompt)[1] == 0
        assert steps(engine, prompt)[1] == 70


def test_requests_leave_no_memory_behind(tiny_dir: Path) -> None:
    """Beyond the snapshots: the same requests again take nothing more."""
    with load(tiny_dir, prefix_cache=ROOM) as engine:
        for prompt, _ in REQUESTS.values():
            steps(engine, prompt)
        before = mx.get_active_memory()
        for prompt, _ in REQUESTS.values():
            steps(engine, prompt)
        assert mx.get_active_memory() == before
        held = engine.stats()["prefix_bytes"]
        engine.prefixes.clear()
        assert 0 <= before - mx.get_active_memory() - held <= 2**15


# -- where a prompt is cut -------------------------------------------------------------------------------------------------


def test_a_cut_depends_on_nothing_that_follows_it() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        ids = rng.integers(2, 12, size=rng.integers(2, 300)).tolist()  # an end of a turn every ten tokens
        whole = cut(ids, CHUNK, {END})
        begin = ids[: rng.integers(1, len(ids))]
        beginning = cut(begin, CHUNK, {END})
        assert [at for at in beginning.cuts if at < len(begin) - 1] == [at for at in whole.cuts if at < len(begin) - 1]
        assert sum(whole.passes(), ()) == tuple(ids[:-1])
        assert all(len(ids) <= CHUNK for ids in whole.passes())
        assert set(whole.turns) <= set(whole.cuts)


def test_without_ends_of_turns_a_prompt_goes_in_full_chunks() -> None:
    assert cut([5] * 50, CHUNK, ()).cuts == (24, 48, 49)
    assert cut([5] * 49, CHUNK, ()).cuts == (24, 48)
    assert cut([5], CHUNK, ()).passes() == []


def test_snapshots_are_worth_most_where_prompts_part() -> None:
    turns = [token for seed in range(4) for token in turn(seed, 30)]
    assert cut([*turns, *BEGIN], 512, {END}).worthwhile() == [120, 90, 30]
    assert cut([*turns, *[5] * SHORTEST, 6], 512, {END}).worthwhile() == [136, 120, 90, 30]
    assert cut([5] * 100, 24, {END}).worthwhile() == [99, 96]
    assert cut([*FIRST, *BEGIN], 512, {END}).worthwhile() == [40]
    assert cut([5], 24, {END}).worthwhile() == []


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_a_size_that_has_no_meaning_is_named(tiny_dir: Path, wrong: float) -> None:
    with pytest.raises(Edge0Error, match="prefix_cache"):
        Engine.load(tiny_dir, prefix_cache=wrong)
