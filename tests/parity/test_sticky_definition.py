"""What the runtime serves of a sticky tier is docs/method.md 1.7, set by set: the definition once more, in plain NumPy.

    EDGE0_STICKY_STEPS=10000 python -m pytest -n0 -s -o faulthandler_timeout=0 tests/parity/test_sticky_definition.py

Given are what the engine's heads say (z) and what it ran; the reference knows sequences of sets and nothing else.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from edge0_runtime.contract.tier import Router, Sticky, Tier, builtin_tier
from edge0_runtime.engine import Engine
from edge0_runtime.sequence import Sequence
from edge0_train.base import quantize_checkpoint
from tests.random_adapters import write_adapters
from tests.tiny_models import TEACHER

TIE = 1e-6  # logits, or sigmoids, that float32 orders by chance: an ulp or two
STEPS = int(os.environ.get("EDGE0_STICKY_STEPS", "240"))
TOKENS = 60  # decoded after a prompt
CASES = {
    "softmax, gate": ("nano", "gate", Sticky(2.0, 2)),
    "softmax, predicted": ("nano", "predicted", Sticky(1.5, 5)),
    "groups, gate": ("nano-ling", "gate", Sticky(1.0, 3)),
    "groups, predicted": ("nano-ling", "predicted", Sticky(3.0, 4)),
}
TEACHERS = {"nano": TEACHER, "nano-ling": TEACHER.with_name("nano-ling-teacher")}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) / "int4" for name in TEACHERS}
    for name, directory in made.items():
        quantize_checkpoint(TEACHERS[name], directory, builtin_tier(name))
    return made


@pytest.mark.parametrize("case", CASES)
def test_every_predicted_set_is_what_the_definition_says(bases: dict[str, Path], case: str) -> None:
    name, first_token, sticky = CASES[case]
    plain = builtin_tier(name)
    tier = dataclasses.replace(plain, first_token=first_token, router=dataclasses.replace(plain.router, sticky=sticky))
    write_adapters(bases[name], tier)
    random = np.random.default_rng(0)
    compared = differing = ties = moved = steps = 0
    with Engine.load(bases[name]) as engine:
        plan = engine.model.plan
        assert plan is not None
        while steps < STEPS:
            if steps // TOKENS % 2 == 0:  # streamed, and with every expert in memory, in turns
                engine.set_memory_budget((plan.fixed_bytes + 100 * plan.slot_nbytes) / 2**30)
            else:
                engine.set_memory_budget(None)
            for z_CE, ran in served(engine, random):
                steps += 1
                for layer, z_E in zip(tier.consumers, z_CE, strict=True):
                    *before, now = ran[layer]
                    by_E = by_definition(tier, z_E, before)
                    compared += 1
                    if now != best(tier, by_E):
                        tie = min(by_E[[*now]]) >= np.sort(by_E)[-tier.k] - TIE
                        ties, differing = ties + tie, differing + (not tie)
                    moved += now != best(tier, by_definition(tier, z_E, []))
        assert engine.stats()["dropped_experts"] == 0
    print(
        f"{case}: {steps} steps, {compared} sets compared, {differing} differ and {ties} at a tie; the bonus changed {moved}"
    )
    assert differing == 0 and ties <= compared / 5000 and compared / 5 < moved < compared


def served(engine: Engine, random: np.random.Generator) -> Iterator[tuple[np.ndarray, dict[int, list[set[int]]]]]:
    """Of each predicted step of a random text: the heads' logits for it [C, E], and by layer all sets that ran up to it."""
    tier, heads = engine.model.tier, engine.model.heads
    assert heads is not None
    sequence, ran = Sequence(engine.model), {layer: [] for layer in tier.consumers}
    for size in random.integers(1, 30, size=random.integers(1, 4)):  # chunks of the prompt
        sequence.prefill(random.integers(3, 384, size=size).tolist(), last=True)
        remember(sequence, ran)
    for token in random.integers(3, 384, size=TOKENS).tolist():
        features = sequence.last.features
        embedding_D = engine.model.parts.embed(mx.array([token]))[0]
        z_OE = None if features is None else np.array(heads(features._asdict(), embedding_D))
        sequence.decode(token)
        remember(sequence, ran)
        if z_OE is not None:
            yield z_OE[: len(tier.consumers)], ran
    sequence.close()


def remember(sequence: Sequence, ran: dict[int, list[set[int]]]) -> None:
    for layer, sets in ran.items():
        sets += [{*row} for row in np.array(sequence.last.ran[layer]).tolist()]


def by_definition(tier: Tier, z_E: np.ndarray, ran_before: list[set[int]]) -> np.ndarray:
    """[E], what docs/method.md 1.7 and 1.2 choose one layer's experts at one input by, in float64."""
    sticky, router = tier.router.sticky, tier.router
    recent_E = np.zeros(len(z_E))
    for chosen in ran_before[-sticky.window :]:
        recent_E[sorted(chosen)] = 1.0
    by_E = z_E.astype(np.float64) + sticky.bias * recent_E
    if router.kind == "sigmoid_group":
        by_E = best_groups(router, 1 / (1 + np.exp(-by_E)))
    return by_E


def best(tier: Tier, by_E: np.ndarray) -> set[int]:
    return set(np.argsort(-by_E)[: tier.k].tolist())


def best_groups(router: Router, score_E: np.ndarray) -> np.ndarray:
    """The scores; -1 in groups that stay out."""
    groups = np.split(np.arange(len(score_E)), router.n_group)
    groups.sort(key=lambda group: -np.sort(score_E[group])[-2:].sum())
    out = np.concatenate(groups[router.topk_group :])
    return np.where(np.isin(np.arange(len(score_E)), out), -1.0, score_E)
