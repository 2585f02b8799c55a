"""`route` equals the formulas of docs/method.md 1.2, written out one token at a time in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from edge0_runtime.contract.tier import Router
from edge0_runtime.routing import route

SIGMOID = Router("sigmoid_group", n_group=8, topk_group=4, scaling=2.5)


def plain_softmax_topk(logits_E: np.ndarray, k: int) -> dict[int, float]:
    probability_E = np.exp(logits_E - logits_E.max())
    probability_E /= probability_E.sum()
    chosen = np.argsort(-probability_E)[:k]
    return {int(e): probability_E[e] / probability_E[chosen].sum() for e in chosen}


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
