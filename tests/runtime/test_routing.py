"""`route` equals the formulas of docs/method.md 1.2, written out one token at a time in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from edge0_runtime.contract.tier import Router
from edge0_runtime.routing import choice_gap, route, scores, within_mass

SIGMOID = Router("sigmoid_group", n_group=8, topk_group=4, scaling=2.5)


def plain_softmax_topk(logits_E: np.ndarray, k: int, mass_k: int = 0) -> dict[int, float]:
    probability_E = np.exp(logits_E - logits_E.max())
    probability_E /= probability_E.sum()
    ranked = np.argsort(-probability_E)
    return {int(e): probability_E[e] / probability_E[ranked[: mass_k or k]].sum() for e in ranked[:k]}


def plain_sigmoid_group(router: Router, logits_E: np.ndarray, k: int, bias_E: np.ndarray) -> dict[int, float]:
    score_E = 1 / (1 + np.exp(-logits_E))
    choice_E = score_E + bias_E
    groups = np.split(np.arange(len(logits_E)), router.n_group)
    best = sorted(groups, key=lambda g: -np.sort(choice_E[g])[-2:].sum())[: router.topk_group]
    allowed = np.concatenate(best)
    chosen = allowed[np.argsort(-choice_E[allowed])[:k]]
    total = score_E[chosen].sum() + 1e-20
    return {int(e): router.scaling * score_E[e] / total for e in chosen}


def as_dictionaries(indices: mx.array, weights: mx.array) -> list[dict[int, float]]:
    rows = zip(np.array(indices), np.array(weights), strict=True)
    return [dict(zip(i.tolist(), w.tolist(), strict=True)) for i, w in rows]


def test_softmax_topk() -> None:
    logits = np.random.default_rng(0).standard_normal((50, 32)) * 3
    got = as_dictionaries(*route(Router("softmax_topk"), mx.array(logits.astype(np.float32)), 4))
    for row, logits_E in zip(got, logits, strict=True):
        assert row == pytest.approx(plain_softmax_topk(logits_E, 4), abs=1e-6)


@pytest.mark.parametrize("mass_k", [4, 9, 32])
def test_a_wider_mass_twice(mass_k: int) -> None:
    """By `route`, and as a block computes it that does not renormalise what a narrowed softmax gives."""
    router = Router("softmax_topk", mass_k=mass_k)
    logits = np.random.default_rng(0).standard_normal((50, 32)).astype(np.float32) * 3
    want = [plain_softmax_topk(logits_E.astype(np.float64), 4, mass_k) for logits_E in logits]
    narrowed = mx.softmax(within_mass(router, mx.array(logits)), axis=-1, precise=True)
    assert int((narrowed > 0).sum(axis=-1).max()) == mass_k
    indices = mx.argpartition(narrowed, kth=-4, axis=-1)[..., -4:]
    in_a_block = as_dictionaries(indices, mx.take_along_axis(narrowed, indices, axis=-1))
    for rows in (as_dictionaries(*route(router, mx.array(logits), 4)), in_a_block):
        assert all(row == pytest.approx(plain, abs=1e-6) for row, plain in zip(rows, want, strict=True))


def test_weights_that_are_not_renormalised_are_the_softmax_itself() -> None:
    logits = np.random.default_rng(0).standard_normal((50, 32)) * 3
    got = as_dictionaries(*route(Router("softmax_topk", renormalise=False), mx.array(logits.astype(np.float32)), 4))
    for row, logits_E in zip(got, logits, strict=True):
        assert row == pytest.approx(plain_softmax_topk(logits_E, 4, 32), abs=1e-6)


@pytest.mark.parametrize("biased", [False, True])
def test_sigmoid_group(biased: bool) -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((50, 64)) * 2
    # negative enough that a biased score of a kept group lies below zero
    bias_E = rng.standard_normal(64) - 1.5 if biased else np.zeros(64)
    bias = mx.array(bias_E.astype(np.float32)) if biased else None
    got = as_dictionaries(*route(SIGMOID, mx.array(logits.astype(np.float32)), 8, bias))
    for row, logits_E in zip(got, logits, strict=True):
        assert row == pytest.approx(plain_sigmoid_group(SIGMOID, logits_E, 8, bias_E), abs=1e-6)


def test_leading_shapes_are_kept() -> None:
    indices, weights = route(SIGMOID, mx.zeros((2, 3, 64)), 8)
    assert indices.shape == weights.shape == (2, 3, 8)


# -- near-ties


def choose(router: Router, score_E: np.ndarray, k: int) -> list[int]:
    groups = np.split(np.arange(len(score_E)), router.n_group)
    best = sorted(groups, key=lambda g: -np.sort(score_E[g])[-2:].sum())[: router.topk_group]
    allowed = np.concatenate(best)
    return allowed[np.argsort(-score_E[allowed])[:k]].tolist()


@pytest.mark.parametrize("router", [Router("softmax_topk"), SIGMOID])
def test_a_choice_that_the_scores_make_has_no_gap_and_one_of_almost_the_same_scores_a_tiny_one(router: Router) -> None:
    rng = np.random.default_rng(2)
    changed = 0
    for _ in range(300):
        score_E = np.array(scores(router, mx.array(rng.standard_normal(64).astype(np.float32))))
        own = choose(router, score_E, 8)
        assert choice_gap(router, score_E, own) <= 0
        noise = 1e-2 * score_E.std()
        other = choose(router, score_E + rng.uniform(-noise, noise, 64), 8)
        assert choice_gap(router, score_E, other) <= 4 * noise  # a group's score is a sum of two
        changed += set(other) != set(own)
        swapped = [*own[:-1], int(score_E.argmin())]
        assert choice_gap(router, score_E, swapped) > 50 * noise
    assert changed > 3


def test_gaps_by_hand() -> None:
    router = Router("sigmoid_group", n_group=3, topk_group=2)
    score_E = np.array([0.9, 0.1, 0.5, 0.4, 0.6, 0.25])  # groups: 1.0, 0.9, 0.85
    assert choice_gap(router, score_E, [0, 2]) == pytest.approx(-0.05)  # the nearest rival: the third group
    assert choice_gap(router, score_E, [0, 3]) == pytest.approx(0.1)  # expert 2 leads expert 3
    assert choice_gap(router, score_E, [0, 4]) == pytest.approx(0.05)  # the second group leads the third
    assert choice_gap(router, score_E, [2, 4]) == pytest.approx(0.15)  # the first group leads the third
    assert choice_gap(router, score_E, [0, 2, 4]) == float("inf")  # three groups at once: no scores choose so
