"""Losses of heads: hand numbers in value and gradient, groups and biases of the router that they are to replace."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from edge0_runtime.contract.tier import Router
from edge0_train.losses import (
    HEAD_LOSSES,
    MARGIN,
    head_bce,
    head_kl,
    head_kl_margin,
)
from edge0_train.student.router import multi_hot, select
from tests.train.random_logits import random

SOFTMAX = Router("softmax_topk")
SIGMOID = Router("sigmoid_group", n_group=4, topk_group=2, scaling=2.5)


def test_head_kl_softmax_hand_numbers():
    """target p = (.5, .5), head q = (.9, .1): .5 ln(.5/.9) + .5 ln(.5/.1); d/dlogit = q - p."""
    head = torch.tensor([[0.9, 0.1], [0.5, 0.5]]).log().requires_grad_()
    loss = head_kl(SOFTMAX, head, torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log(), 1)
    assert float(loss.detach()) == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(5))
    loss.backward()
    assert head.grad is not None
    torch.testing.assert_close(head.grad, torch.tensor([[0.4, -0.4], [0.0, 0.0]]), atol=1e-6, rtol=0)


def test_head_kl_sigmoid_hand_numbers():
    """Bernoulli .8 against .5: .8 ln(.8/.5) + .2 ln(.2/.5); d/dlogit = sigmoid(head) - sigmoid(target)."""
    head = torch.tensor([[0.0, math.log(4)]]).requires_grad_()
    loss = head_kl(SIGMOID, head, torch.tensor([[math.log(4), math.log(4)]]), 1)
    assert float(loss.detach()) == pytest.approx(0.8 * math.log(1.6) + 0.2 * math.log(0.4), rel=1e-5)
    loss.backward()
    assert head.grad is not None
    torch.testing.assert_close(head.grad, torch.tensor([[-0.3, 0.0]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("router", [SOFTMAX, SIGMOID])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_head_kl_is_zero_at_equality_and_not_negative(router, scale):
    target = random(50, 16, seed=15, scale=scale)
    same = target.clone().requires_grad_()
    loss = head_kl(router, same, target, 4)
    loss.backward()
    assert abs(float(loss.detach())) < 1e-3
    assert same.grad is not None and float(same.grad.abs().max()) < 1e-6
    for row in range(50):
        assert float(head_kl(router, random(1, 16, seed=row, scale=scale), target[row : row + 1], 4)) >= -1e-4
    assert math.isfinite(float(head_kl(router, random(50, 16, seed=16, scale=1e4), target, 4)))


def test_head_kl_is_a_sum_over_tokens():
    head, target = random(6, 16, seed=17), random(6, 16, seed=18)
    for router in (SOFTMAX, SIGMOID):
        whole = float(head_kl(router, head, target, 4))
        assert whole == pytest.approx(
            sum(float(head_kl(router, head[n : n + 1], target[n : n + 1], 4)) for n in range(6)), rel=1e-4
        )


def test_head_bce_hand_numbers():
    """target's top 1 is expert 1; head logits (0, ln 3): ln 2 for a miss at .5, -ln .75 for a hit at .75."""
    head = torch.tensor([[0.0, math.log(3), -50.0]]).requires_grad_()
    loss = head_bce(SOFTMAX, head, torch.tensor([[0.1, 5.0, 0.2]]), 1)
    assert float(loss.detach()) == pytest.approx(math.log(2) - math.log(0.75), rel=1e-6)
    loss.backward()
    assert head.grad is not None
    torch.testing.assert_close(head.grad, torch.tensor([[0.5, -0.25, 0.0]]), atol=1e-6, rtol=0)


def test_head_bce_targets_the_k_served_experts():
    target = random(10, 16, seed=19)
    for k in (2, 4):
        want = 0.0
        head = random(10, 16, seed=20)
        for h, t in zip(head.double().tolist(), target.tolist(), strict=True):
            chosen = sorted(range(16), key=lambda e: -t[e])[:k]
            want += sum(math.log1p(math.exp(-x)) if e in chosen else math.log1p(math.exp(x)) for e, x in enumerate(h))
        assert float(head_bce(SOFTMAX, head, target, k)) == pytest.approx(want, rel=1e-5)


def test_the_best_head_by_kl_chooses_what_a_biased_gate_chooses():
    """Gradient descent on the head's logits themselves: without the bias in the target it would choose other experts."""
    random = torch.Generator().manual_seed(2)
    target, bias = torch.randn(64, 16, generator=random), 0.1 * torch.randn(16, generator=random)
    wanted = multi_hot(select(SIGMOID, target, 4, bias), 16)
    assert not torch.equal(multi_hot(select(SIGMOID, target, 4), 16), wanted)
    head = torch.zeros(64, 16, requires_grad=True)
    optimizer = torch.optim.Adam([head], lr=0.1)
    for _ in range(400):
        optimizer.zero_grad()
        head_kl(SIGMOID, head, target, 4, bias).backward()
        optimizer.step()
    value = float(head_kl(SIGMOID, head.detach(), target, 4, bias))
    assert 0 <= value < 1e-3 * float(head_kl(SIGMOID, torch.zeros(64, 16), target, 4, bias))
    assert torch.equal(multi_hot(select(SIGMOID, head, 4), 16), wanted)


def test_head_bce_of_a_sigmoid_router_targets_the_set_that_it_routes_to():
    """Only the best groups can be routed to: with 4 groups of 4 and 2 kept, the lone best expert of a poor group is no target."""
    target = torch.full((1, 16), -8.0)
    target[0, 0] = 3.0  # the best expert, alone in its group: group score .95
    target[0, 4:6] = 2.0  # group scores 1.76 and 1.62
    target[0, 8:10] = 1.5
    good = torch.full((1, 16), -30.0)
    good[0, [4, 5, 8, 9]] = 30.0
    assert float(head_bce(SIGMOID, good, target, 4)) == pytest.approx(0.0, abs=1e-5)


def margin_part(router: Router, head: torch.Tensor, target: torch.Tensor, k: int, bias: Any = None) -> float:
    """The hinge alone."""
    return float(head_kl_margin(router, head, target, k, bias) - head_kl(router, head, target, k, bias))


def test_head_kl_margin_hand_numbers():
    """True order 2, 0, 1, K = 1: expert 2 must lead expert 0 by MARGIN = 1; head logits (.5, 0, 1) lead by .5.

    hinge = 1 - .5; its gradient is -1 at expert 2 and +1 at expert 0, beside KL's softmax(head) - softmax(target).
    """
    assert MARGIN == 1.0
    target = torch.tensor([[2.0, 1.0, 3.0]])
    head = torch.tensor([[0.5, 0.0, 1.0]]).requires_grad_()
    loss = head_kl_margin(SOFTMAX, head, target, 1)
    loss.backward()
    q, p = head.detach().softmax(-1), target.softmax(-1)
    assert float(loss.detach()) == pytest.approx(float((p * (p / q).log()).sum()) + 0.5, rel=1e-5)
    assert head.grad is not None
    torch.testing.assert_close(head.grad, q - p + torch.tensor([[1.0, 0.0, -1.0]]), atol=1e-6, rtol=0)


def test_head_kl_margin_is_silent_beyond_the_margin_and_without_a_boundary():
    target = torch.tensor([[2.0, 1.0, 3.0]])
    assert margin_part(SOFTMAX, torch.tensor([[0.0, 5.0, 1.0]]), target, 1) == 0  # expert 1 isn't at K = 1's boundary
    assert margin_part(SOFTMAX, torch.tensor([[0.0, 5.0, 1.0]]), target, 2) == pytest.approx(1 + 5)
    assert margin_part(SOFTMAX, torch.tensor([[0.0, 5.0, 1.0]]), target, 3) == 0


def test_head_kl_margin_of_a_sigmoid_router_takes_groups_and_bias_from_it():
    """Experts 4, 5, 8, 9 are routed to (see the BCE test); without expert 9 in K, it is the first one outside."""
    target = torch.full((1, 16), -8.0)
    target[0, 0] = 3.0
    target[0, 4:6] = torch.tensor([2.0, 1.9])
    target[0, 8:10] = torch.tensor([1.5, 1.4])
    head = torch.zeros(1, 16)
    head[0, 8], head[0, 9] = 0.25, 0.5
    assert margin_part(SIGMOID, head, target, 3) == pytest.approx(1 + 0.25, rel=1e-4)
    bias = torch.zeros(16)
    bias[9] = 0.05  # now the layer's own order is 4, 5, 9, 8
    assert margin_part(SIGMOID, head, target, 3, bias) == pytest.approx(1 - 0.25, rel=1e-4)


def test_every_head_loss_has_the_same_signature():
    for loss in HEAD_LOSSES.values():
        for router in (SOFTMAX, SIGMOID):
            assert math.isfinite(float(loss(router, random(3, 16), random(3, 16, seed=1), 4)))
            assert float(loss(router, torch.zeros(0, 16), torch.zeros(0, 16), 4)) == 0
