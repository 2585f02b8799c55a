"""Sticky prerouting in training: the loop, the fixed point and a plain definition choose the same; nothing depends on the way."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch

from edge0_runtime.contract.tier import Router, Sticky
from edge0_train.student.router import scores, select
from edge0_train.student.sticky import Choices, fixed_point, never, one_by_one

EXPERTS, K = 32, 4
SOFTMAX = Router("softmax_topk")
GROUPS = Router("sigmoid_group", n_group=8, topk_group=4, scaling=2.5)


def sticky(router: Router, bias: float, window: int) -> Router:
    return dataclasses.replace(router, sticky=Sticky(bias, window))


def random_choices(router: Router, seed: int, rows: int = 3, tokens: int = 40, spread: float = 2.0) -> Choices:
    """Logits; a prompt on own gates; a second document that begins somewhere; a padded beginning; something carried in."""
    generator = torch.Generator().manual_seed(seed)
    predicted_BTE = spread * torch.randn(rows, tokens, EXPERTS, generator=generator)
    own_BTK = select(router, spread * torch.randn(rows * tokens, EXPERTS, generator=generator), K).unflatten(
        0, (rows, -1)
    )
    by_head_BT = torch.rand(rows, tokens, generator=generator) < 0.8
    by_head_BT[:, :5] = False
    first_BT = torch.zeros(rows, tokens, dtype=torch.bool)
    first_BT[0, 0] = first_BT[0, 17] = first_BT[1, 3] = True
    cap = router.sticky.window + 1
    since_BE = torch.randint(1, cap + 1, (rows, EXPERTS), generator=generator).to(torch.int16)
    return Choices(predicted_BTE, own_BTK, by_head_BT, first_BT, since_BE)


def by_definition(router: Router, choices: Choices) -> list[list[set[int]]]:
    """docs/method.md 1.7, one input at a time, with sets; softmax only, whose order is that of the logits."""
    bias, window = router.sticky.bias, router.sticky.window
    rows, tokens, experts = choices.predicted_BTE.shape
    every = []
    for row in range(rows):
        # sets of the last inputs, oldest first: what was carried in as `since` says it
        history = [{e for e in range(experts) if choices.since_BE[row, e] == ago} for ago in range(window, 0, -1)]
        ran: list[set[int]] = []
        for t in range(tokens):
            if choices.first_BT[row, t]:
                history = []
            recent = set().union(*history[-window:])
            chosen = set(choices.own_BTK[row, t].tolist())
            if choices.by_head_BT[row, t]:
                logits = choices.predicted_BTE[row, t].tolist()
                by_bonus = sorted(range(experts), key=lambda e: -(logits[e] + bias * (e in recent)))
                chosen = set(by_bonus[:K])
            ran.append(chosen)
            history.append(chosen)
        every.append(ran)
    return every


SETTINGS = [(0.5, 1), (1.0, 2), (2.0, 2), (3.0, 4), (8.0, 1), (100.0, 7)]


@pytest.mark.parametrize(("bias", "window"), SETTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_both_ways_choose_what_the_definition_says(bias: float, window: int, seed: int) -> None:
    router = sticky(SOFTMAX, bias, window)
    choices = random_choices(router, seed)
    walked, fixed = one_by_one(router, choices), fixed_point(router, choices)
    assert [[set(ids) for ids in row] for row in walked[0].tolist()] == by_definition(router, choices)
    assert torch.equal(walked[0], fixed[0]) and torch.equal(walked[1], fixed[1])


@pytest.mark.parametrize(("bias", "window"), SETTINGS)
def test_both_ways_agree_where_groups_are_chosen_first(bias: float, window: int) -> None:
    router = sticky(GROUPS, bias, window)
    for seed in range(3):
        choices = random_choices(router, seed)
        walked, fixed = one_by_one(router, choices), fixed_point(router, choices)
        assert torch.equal(walked[0], fixed[0]) and torch.equal(walked[1], fixed[1])


@pytest.mark.parametrize("router", [SOFTMAX, GROUPS], ids=["softmax", "groups"])
@pytest.mark.parametrize("cut", [1, 7, 20, 39])
def test_a_sequence_in_two_passes_is_the_sequence_in_one(router: Router, cut: int) -> None:
    router = sticky(router, 2.0, 3)
    whole = random_choices(router, 5)
    parts = [
        dataclasses.replace(
            whole,
            **{name: getattr(whole, name)[:, part] for name in ("predicted_BTE", "own_BTK", "by_head_BT", "first_BT")},
        )
        for part in (slice(0, cut), slice(cut, None))
    ]
    for way in (one_by_one, fixed_point):
        ran_BTK, since_BE = way(router, whole)
        first_BTK, between_BE = way(router, parts[0])
        second_BTK, after_BE = way(router, dataclasses.replace(parts[1], since_BE=between_BE))
        assert torch.equal(torch.cat([first_BTK, second_BTK], 1), ran_BTK)
        assert torch.equal(after_BE, since_BE)


def test_a_bonus_changes_who_is_chosen_and_keeps_more_from_input_to_input() -> None:
    kept = []
    for bias in (0.0, 1.0, 2.0, 4.0):
        router = sticky(SOFTMAX, bias, 2) if bias else sticky(SOFTMAX, 1e-9, 2)
        choices = dataclasses.replace(random_choices(router, 0, tokens=200))
        ran_BTK, _ = one_by_one(router, choices)
        same = [len(set(a) & set(b)) for row in ran_BTK.tolist() for a, b in pairwise(row)]
        kept.append(sum(same) / len(same))
    assert kept == sorted(kept) and kept[-1] > kept[0] + 1


def test_nothing_ran_before_a_first_input() -> None:
    router = sticky(SOFTMAX, 50.0, 4)
    choices = random_choices(router, 1)
    choices.by_head_BT[:] = True
    choices.first_BT[:, 10] = True
    ran_BTK, _ = one_by_one(router, choices)
    plain_BK = scores(router, choices.predicted_BTE[:, 10]).topk(K).indices
    assert torch.equal(ran_BTK[:, 10].sort().values, plain_BK.sort().values)
    assert int(never(router, choices.since_BE).min()) == 5
