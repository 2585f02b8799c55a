"""benchmarks/peers.py: plain mlx-lm stands for a peer; how the real ones are called can't be tested without them."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from benchmarks import peers
from benchmarks.peer_glue import Shape
from benchmarks.slow_disk import SlowDisk

TOKENS = 6


def mlx_lm(shape: Shape, disk: SlowDisk) -> Any:
    """A peer that reads a byte a token."""
    model, _ = load_model(shape.directory)
    model.set_dtype(mx.float32)
    read = disk.slowed(lambda: b"x", len)

    class Reading(type(model)):
        def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
            read()
            return super().__call__(*args, **kwargs)

    model.__class__ = Reading
    return model


@pytest.fixture
def models(two_tiers: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which a tiny model is the checkpoint, and mlx-lm a peer."""
    monkeypatch.setattr(os, "preadv", os.preadv)  # put back afterwards
    monkeypatch.setattr(peers, "K", 2)
    monkeypatch.setattr(peers, "SLOTS", 3)
    monkeypatch.setitem(peers.PEERS, "mlx-lm", ("mlx-lm", mlx_lm))
    return two_tiers


def test_a_peer_answers_what_our_exact_arms_answer(models: Path) -> None:
    ours = peers.measure("on_demand", 10**6, models, TOKENS, None)
    assert len(ours["ids"]) == TOKENS and ours["bytes_per_step"] > 0
    for who in ("lookahead", "mlx-lm"):
        assert peers.measure(who, 10**6, models, TOKENS, None)["ids"] == ours["ids"]
    # mlx-lm's loop is a token ahead of what it hands out, and so is the count
    assert peers.measure("mlx-lm", 10**6, models, TOKENS, None)["bytes_per_step"] == pytest.approx(1, abs=0.25)


def test_predicting_arms_process_the_given_answer(models: Path) -> None:
    known = [5, 6, 7, 8, 9, 10]
    for who in ("prerouter", peers.STICKY):
        assert peers.measure(who, 10**6, models, TOKENS, known)["ids"] == known


def test_everybody_holds_as_many_experts(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, engines = [], []
    monkeypatch.setitem(peers.PEERS, "mlx-lm", ("mlx-lm", lambda shape, disk: held.append(shape)))
    load = peers.load

    def noted(*args: Any, **kwargs: Any) -> Any:
        engines.append(load(*args, **kwargs))
        return engines[-1]

    monkeypatch.setattr(peers, "load", noted)
    peers._ours("prerouter", models / "disk-bound-k2", SlowDisk(math.inf), None)
    peers._peer("mlx-lm", models / "disk-bound-k2", SlowDisk(math.inf))
    memory = engines[1].model.memory  # the first one was asked for its plan
    assert memory is not None and memory.slots == held[0].layers * held[0].slots == 4 * 3


def test_the_table_compares_with_the_best_peer_and_shows_other_ids() -> None:
    def row(who: str, speed: float, ids: list[int], mib_s: int = 400) -> dict[str, Any]:
        return {
            "who": who, "mib_s": mib_s, "ids": ids, "tokens_per_second": speed,
            "bytes_per_step": 3 * 2**20, "mlx_peak_bytes": 2**29,
        }  # fmt: skip

    rows = [
        row("on_demand", 2.0, [1, 2, 3]), row("prerouter", 4.0, [1, 2, 3]),
        row("streamlx", 2.0, [1, 2, 3]), row("streamlx", 3.0, [1, 2, 3]), row("boyle", 1.0, [1, 2, 4]),
    ]  # fmt: skip
    assert peers.table(rows).splitlines()[2:] == [
        "| 400 | on_demand | 2.00 (2.00 to 2.00) | 0.80 | 3 | 512 | same |",
        "| 400 | prerouter | 4.00 (4.00 to 4.00) | 1.60 | 3 | 512 | given |",
        "| 400 | streamlx | 2.50 (2.00 to 3.00) | 1.00 | 3 | 512 | same |",
        "| 400 | boyle | 1.00 (1.00 to 1.00) | 0.40 | 3 | 512 | others from token 2 |",
    ]
