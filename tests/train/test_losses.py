"""Losses over the vocabulary: hand numbers in value and gradient, float64 references (docs/method.md 2)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.losses import (
    cross_entropy,
    forward_kl,
    log_tail,
    mass_on,
    reverse_kl,
    reverse_kl_no_tail,
    sampled_token,
    token_logp,
    topk_with_tail,
)
from tests.train.random_logits import random


def rkl(student_NV: torch.Tensor, teacher_NV: torch.Tensor, k: int) -> torch.Tensor:
    return reverse_kl(student_NV, *topk_with_tail(teacher_NV, k))


def plain_rkl(student_NV: torch.Tensor, teacher_NV: torch.Tensor, k: int) -> torch.Tensor:
    """The formula, in float64 and token by token; the tail as a plain sum of what is outside."""
    total = torch.zeros((), dtype=torch.float64)
    for student, teacher in zip(student_NV.double(), teacher_NV.double(), strict=True):
        p, q = student.softmax(-1), teacher.softmax(-1)
        inside = sorted(range(len(q)), key=lambda v: -float(q[v]))[:k]
        outside = [v for v in range(len(q)) if v not in inside]
        for v in inside:
            total = total + p[v] * (p[v].log() - q[v].log())
        if outside:
            p_tail, q_tail = (torch.stack([d[v] for v in outside]).sum() for d in (p, q))
            total = total + p_tail * (p_tail.log() - q_tail.log())
    return total


# -- reverse KL --------------------------------------------------------------------------------------------------------


def test_reverse_kl_hand_numbers():
    """p = (.6, .4), q = (.9, .1), k = 1: S = {0}, the tail is the other token.

    value = .6 ln(.6/.9) + .4 ln(.4/.1); d/dlogit_v = p_v (ln(p_v/q_v) - value).
    """
    student = torch.tensor([[0.6, 0.4]]).log().requires_grad_()
    loss = rkl(student, torch.tensor([[0.9, 0.1]]).log(), 1)
    value = 0.6 * math.log(0.6 / 0.9) + 0.4 * math.log(0.4 / 0.1)
    assert value == pytest.approx(0.31123868)
    assert float(loss.detach()) == pytest.approx(value, rel=1e-6)
    loss.backward()
    slope = 0.6 * (math.log(0.6 / 0.9) - value)
    assert slope == pytest.approx(-0.43002229)
    assert student.grad is not None
    assert student.grad[0].tolist() == pytest.approx([slope, -slope], rel=1e-5)


def test_reverse_kl_hand_numbers_with_a_tail_of_two():
    """p = (.5, .3, .2), q = (.7, .1, .2), k = 1: the tail's own members are not told apart."""
    student = torch.tensor([[0.5, 0.3, 0.2]]).log().requires_grad_()
    loss = rkl(student, torch.tensor([[0.7, 0.1, 0.2]]).log(), 1)
    value = 0.5 * math.log(0.5 / 0.7) + 0.5 * math.log(0.5 / 0.3)
    assert float(loss.detach()) == pytest.approx(value, rel=1e-6)
    loss.backward()
    tail = math.log(0.5 / 0.3) - value
    want = [0.5 * (math.log(0.5 / 0.7) - value), 0.3 * tail, 0.2 * tail]
    assert student.grad is not None and student.grad[0].tolist() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("k", [1, 4, 31, 32])
def test_reverse_kl_is_zero_with_zero_gradient_at_equality(k):
    logits = random(16, 32, scale=3).requires_grad_()
    loss = rkl(logits, logits.detach(), k)
    loss.backward()
    assert abs(float(loss.detach())) < 1e-5
    assert logits.grad is not None and float(logits.grad.abs().max()) < 1e-6


@pytest.mark.parametrize("k", [1, 3, 8, 31, 32])
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_reverse_kl_equals_float64_in_value_and_gradient(k, scale):
    student, teacher = random(12, 32, seed=1, scale=scale), random(12, 32, seed=2, scale=scale)
    ours = student.clone().requires_grad_()
    loss = rkl(ours, teacher, k)
    loss.backward()
    reference = student.double().requires_grad_()
    want = plain_rkl(reference, teacher, k)
    want.backward()
    assert float(loss.detach()) == pytest.approx(float(want.detach()), rel=1e-5, abs=1e-5)
    assert ours.grad is not None and reference.grad is not None
    torch.testing.assert_close(ours.grad.double(), reference.grad, rtol=1e-4, atol=1e-5 * max(1.0, scale))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 20.0, 300.0, 3e4])
def test_reverse_kl_is_not_negative_and_finite(scale):
    """Row by row, so that no row hides behind another; also logits far beyond what float32's exp can hold."""
    student, teacher = random(200, 24, seed=3, scale=scale), random(200, 24, seed=4, scale=scale)
    for k in (1, 5, 23, 24):
        for row in range(0, 200, 10):
            one = student[row : row + 1].clone().requires_grad_()
            loss = rkl(one, teacher[row : row + 1], k)
            loss.backward()
            assert math.isfinite(float(loss.detach())) and float(loss.detach()) >= -2e-6
            assert one.grad is not None and bool(torch.isfinite(one.grad).all())


def test_k_of_the_whole_vocabulary_is_the_exact_kl():
    student, teacher = random(9, 20, seed=5), random(9, 20, seed=6)
    p, logp, logq = student.double().softmax(-1), student.double().log_softmax(-1), teacher.double().log_softmax(-1)
    exact = float((p * (logp - logq)).sum())
    ids, _, tail = topk_with_tail(teacher, 20)
    assert ids.shape == (9, 20) and bool(torch.isneginf(tail).all())
    assert float(rkl(student, teacher, 20)) == pytest.approx(exact, rel=1e-5)


def test_more_tokens_than_the_vocabulary_is_an_error():
    with pytest.raises(Edge0Error, match=r"on_policy.top_k: 21 is larger than the vocabulary of 20"):
        topk_with_tail(random(9, 20), 21)


def test_a_coarser_vocabulary_never_has_a_larger_divergence():
    student, teacher = random(30, 20, seed=5), random(30, 20, seed=6)
    values = [float(rkl(student, teacher, k)) for k in range(1, 21)]
    assert all(a <= b + 1e-5 for a, b in itertools.pairwise(values)) and values[0] < values[-1]


@pytest.mark.parametrize("margin", [5.0, 15.0, 20.0, 40.0, 80.0])
def test_tail_stays_accurate_when_the_top_k_hold_nearly_all_mass(margin):
    """1 - sum_S p cancels to 0 in float32 from a margin of 16 on."""
    student, teacher = random(6, 40, seed=7), random(6, 40, seed=8)
    student[:, :4] += margin
    teacher[:, :4] += margin
    logp = student.double().log_softmax(-1)
    ids, teacher_logp, teacher_tail = topk_with_tail(teacher, 4)
    assert set(ids.flatten().tolist()) == {0, 1, 2, 3}
    want = logp[:, 4:].logsumexp(-1)
    torch.testing.assert_close(log_tail(student.log_softmax(-1), ids).double(), want, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(
        teacher_tail.double(), teacher.double().log_softmax(-1)[:, 4:].logsumexp(-1), rtol=1e-6, atol=1e-5
    )
    torch.testing.assert_close(teacher_logp.exp().sum(-1), torch.ones(6), atol=0.1, rtol=0)
    one = student.clone().requires_grad_()
    loss = rkl(one, teacher, 4)
    loss.backward()
    reference = student.double().requires_grad_()
    plain = plain_rkl(reference, teacher, 4)
    plain.backward()
    assert float(loss.detach()) == pytest.approx(float(plain.detach()), rel=1e-5, abs=1e-6)
    assert one.grad is not None and reference.grad is not None
    torch.testing.assert_close(one.grad.double(), reference.grad, rtol=1e-4, atol=1e-7)


def test_bfloat16_logits_are_worked_on_in_float32():
    student, teacher = random(8, 50, seed=9).bfloat16(), random(8, 50, seed=10).bfloat16()
    got = rkl(student, teacher, 5)
    assert got.dtype == torch.float32
    assert float(got) == float(rkl(student.float(), teacher.float(), 5))
    assert cross_entropy(student, torch.zeros(8, dtype=torch.long)).dtype == torch.float32


# -- controls ----------------------------------------------------------------------------------------------------------


def slope(loss: Any, p: list[float], *targets: Any) -> tuple[float, list[float]]:
    """Value of a loss at one token with student probabilities p, and its gradient with respect to the logits."""
    student = torch.tensor([p]).log().requires_grad_()
    value = loss(student, *targets)
    value.backward()
    assert student.grad is not None
    return float(value.detach()), student.grad[0].tolist()


def test_forward_kl_hand_numbers():
    """p = (.6, .4), q = (.9, .1), k = 1: .9 ln(.9/.6) + .1 ln(.1/.4); two buckets of one token: d/dlogit = p - q."""
    value, gradient = slope(forward_kl, [0.6, 0.4], *topk_with_tail(torch.tensor([[0.9, 0.1]]).log(), 1))
    assert value == pytest.approx(0.9 * math.log(1.5) + 0.1 * math.log(0.25), rel=1e-5)
    assert value == pytest.approx(0.22628916, rel=1e-5)
    assert gradient == pytest.approx([-0.3, 0.3], rel=1e-5)


def test_forward_kl_hand_numbers_with_a_tail_of_two():
    """p = (.5, .3, .2), q = (.7, .1, .2), k = 1: the tail's .3 is wanted in p's own proportions: d/dlogit = p_v - .3 p_v / .5."""
    value, gradient = slope(forward_kl, [0.5, 0.3, 0.2], *topk_with_tail(torch.tensor([[0.7, 0.1, 0.2]]).log(), 1))
    assert value == pytest.approx(0.7 * math.log(0.7 / 0.5) + 0.3 * math.log(0.3 / 0.5), rel=1e-5)
    assert gradient == pytest.approx([0.5 - 0.7, 0.3 - 0.18, 0.2 - 0.12], rel=1e-5)


@pytest.mark.parametrize("k", [1, 5, 24])
def test_forward_kl_is_a_divergence(k):
    """Never negative, zero without gradient at equality; exact with the whole vocabulary."""
    student, teacher = random(40, 24, seed=21, scale=3), random(40, 24, seed=22, scale=3)
    for row in range(40):
        assert float(forward_kl(student[row : row + 1], *topk_with_tail(teacher[row : row + 1], k))) >= -1e-6
    same = teacher.clone().requires_grad_()
    value = forward_kl(same, *topk_with_tail(teacher, k))
    value.backward()
    assert abs(float(value.detach())) < 1e-5
    assert same.grad is not None and float(same.grad.abs().max()) < 1e-6
    if k == 24:
        logp, logq = student.double().log_softmax(-1), teacher.double().log_softmax(-1)
        exact = float((logq.exp() * (logq - logp)).sum())
        assert float(forward_kl(student, *topk_with_tail(teacher, k))) == pytest.approx(exact, rel=1e-5)


def test_no_tail_hand_numbers_and_bias():
    """p = (.6, .4), q = (.9, .1), k = 1: .6 ln(.6/.9), below 0; d/dlogit_0 = p_0 (1 - p_0) (ln(p_0/q_0) + 1).

    At p = q the gradient is not zero, and points out of S: the loss is no divergence.
    """
    value, gradient = slope(reverse_kl_no_tail, [0.6, 0.4], *topk_with_tail(torch.tensor([[0.9, 0.1]]).log(), 1))
    assert value == pytest.approx(0.6 * math.log(0.6 / 0.9), rel=1e-5) and value < 0
    want = 0.6 * 0.4 * (math.log(0.6 / 0.9) + 1)
    assert gradient == pytest.approx([want, -want], rel=1e-5)
    value, gradient = slope(reverse_kl_no_tail, [0.9, 0.1], *topk_with_tail(torch.tensor([[0.9, 0.1]]).log(), 1))
    assert value == pytest.approx(0, abs=1e-6) and gradient == pytest.approx([0.09, -0.09], rel=1e-4)
    student, teacher = random(9, 20, seed=5), random(9, 20, seed=6)
    whole = topk_with_tail(teacher, 20)
    assert float(reverse_kl_no_tail(student, *whole)) == pytest.approx(float(reverse_kl(student, *whole)), rel=1e-5)


def test_sampled_token_hand_numbers():
    """p = (.6, .4), q = (.9, .1), y = 1: r = ln(.4/.1) is the value; d/dlogit = r (onehot(y) - p)."""
    value, gradient = slope(sampled_token, [0.6, 0.4], torch.tensor([1]), torch.tensor([math.log(0.1)]))
    assert value == pytest.approx(math.log(4), rel=1e-5)
    assert gradient == pytest.approx([-0.6 * math.log(4), 0.6 * math.log(4)], rel=1e-5)


def test_sampled_token_averages_to_the_exact_reverse_kl_and_its_gradient():
    """Weighted with p over all tokens y, value and gradient are those of KL(p || q)."""
    p, teacher = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.2, 0.1, 0.6, 0.1]).log()
    value, gradient = 0.0, torch.zeros(4)
    for y, weight in enumerate(p.tolist()):
        one, slopes = slope(sampled_token, p.tolist(), torch.tensor([y]), teacher[y : y + 1])
        value, gradient = value + weight * one, gradient + weight * torch.tensor(slopes)
    exact, exact_slopes = slope(reverse_kl, p.tolist(), *topk_with_tail(teacher[None], 4))
    assert value == pytest.approx(exact, rel=1e-5)
    assert gradient.tolist() == pytest.approx(exact_slopes, rel=1e-4, abs=1e-6)


def test_mass_and_token_log_probability():
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]]).log() + 7  # unnormalised
    assert float(mass_on(logits, torch.tensor([[0, 2], [1, 2]]))) == pytest.approx(0.7 + 0.9, rel=1e-5)
    assert token_logp(logits, torch.tensor([1, 1])).tolist() == pytest.approx([math.log(0.3), math.log(0.8)], rel=1e-5)
