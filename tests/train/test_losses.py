"""Losses: hand numbers in value and gradient, float64 references, and memory (docs/method.md 2)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import Router
from edge0_train.losses import (
    HEAD_LOSSES,
    MARGIN,
    chunked,
    cross_entropy,
    forward_kl,
    head_bce,
    head_kl,
    head_kl_margin,
    log_tail,
    mass_on,
    reverse_kl,
    reverse_kl_no_tail,
    sampled_token,
    token_logp,
    topk_with_tail,
)
from edge0_train.student.router import multi_hot, select

SOFTMAX = Router("softmax_topk")
SIGMOID = Router("sigmoid_group", n_group=4, topk_group=2, scaling=2.5)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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


# -- chunks ------------------------------------------------------------------------------------------------------------

N, H, V = 70, 8, 500


def dense_and_chunked(
    loss: Any, targets: tuple[torch.Tensor, ...], chunk: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    results = []
    for size in (N, chunk):
        hidden, weight = random(N, H, seed=11).requires_grad_(), random(V, H, seed=12).requires_grad_()
        head = lambda x, weight=weight: x @ weight.T  # noqa: E731
        value = loss(head(hidden), *targets) if size == N else chunked(loss, hidden, head, *targets, chunk=size)
        value.backward()
        assert hidden.grad is not None and weight.grad is not None
        results.append([value.detach(), hidden.grad, weight.grad])
    return results[0], results[1]


DENSE_LOSSES = {
    "cross_entropy": cross_entropy,
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "reverse_kl_no_tail": reverse_kl_no_tail,
    "sampled_token": sampled_token,
}


def targets_of(kind: str) -> tuple[torch.Tensor, ...]:
    """What the loss compares with, for N tokens."""
    tokens = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(13))
    teacher = random(N, V, seed=14, scale=2)
    if kind == "cross_entropy":
        return (tokens,)
    return (tokens, token_logp(teacher, tokens)) if kind == "sampled_token" else topk_with_tail(teacher, 16)


@pytest.mark.parametrize("chunk", [1, 7, 64, 69, 1024])
@pytest.mark.parametrize("kind", [*DENSE_LOSSES])
def test_chunked_equals_dense_in_value_and_gradient(kind, chunk):
    dense, parts = dense_and_chunked(DENSE_LOSSES[kind], targets_of(kind), chunk)
    for a, b in zip(parts, dense, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return result


@pytest.mark.parametrize("kind", [*DENSE_LOSSES])
def test_chunked_never_holds_tokens_times_vocabulary(kind):
    """Neither in forward nor in backward; the dense form does, so the probe works."""
    loss, targets = DENSE_LOSSES[kind], targets_of(kind)
    weight = random(V, H, seed=12)
    for chunk, limit in ((10, 10 * V), (None, N * V)):
        hidden = random(N, H, seed=11).requires_grad_()
        with LargestTensor() as largest:
            head = lambda x: x @ weight.T  # noqa: E731
            value = chunked(loss, hidden, head, *targets, chunk=chunk) if chunk else loss(head(hidden), *targets)
            value.backward()
        assert largest.elements == limit


@pytest.mark.parametrize("kind", [*DENSE_LOSSES])
def test_chunked_saves_no_logits_for_backward(kind):
    """What forward keeps alive does not grow with the vocabulary."""
    loss, targets = DENSE_LOSSES[kind], targets_of(kind)
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    weight = random(V, H, seed=12)
    hidden = random(N, H, seed=11).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        chunked(loss, hidden, lambda x: x @ weight.T, *targets, chunk=10)
    assert sum(kept) < 10 * V


def test_chunked_without_tokens_is_zero():
    loss = chunked(cross_entropy, torch.zeros(0, H), lambda x: x @ torch.zeros(H, V), torch.zeros(0, dtype=torch.long))
    assert float(loss) == 0


# -- heads -------------------------------------------------------------------------------------------------------------


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
