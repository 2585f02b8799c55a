"""Router mathematics against transformers' own routers and against plain python (docs/method.md 1.2)."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.bailing_hybrid.configuration_bailing_hybrid import BailingHybridConfig
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridTopkRouter
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter

from edge0_runtime.contract.tier import Router
from edge0_train.student.router import multi_hot, scores, select, weigh

SOFTMAX = Router("softmax_topk")
SIGMOID = Router("sigmoid_group", n_group=8, topk_group=4, scaling=2.5)
TOKENS, EXPERTS, HIDDEN = 64, 32, 16


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- plain python ------------------------------------------------------------------------------------------------------


def plain_softmax(logits: list[float], k: int, mass_k: int = 0) -> dict[int, float]:
    """{expert: weight}"""
    top = max(logits)
    power = [math.exp(x - top) for x in logits]
    ranked = sorted(range(len(logits)), key=lambda e: -power[e])
    total = sum(power[e] for e in ranked[: mass_k or k])
    return {e: power[e] / total for e in ranked[:k]}


def plain_sigmoid(logits: list[float], k: int, bias: list[float] | None, groups: int, kept: int) -> dict[int, float]:
    score = [1 / (1 + math.exp(-x)) for x in logits]
    choice = [s + b for s, b in zip(score, bias or [0.0] * len(score), strict=True)]
    size = len(logits) // groups
    members = [range(g * size, (g + 1) * size) for g in range(groups)]
    best = sorted(members, key=lambda m: -sum(sorted((choice[e] for e in m), reverse=True)[:2]))[:kept]
    allowed = [e for m in best for e in m]
    chosen = sorted(allowed, key=lambda e: -choice[e])[:k]
    total = sum(score[e] for e in chosen) + 1e-20
    return {e: 2.5 * score[e] / total for e in chosen}


def as_dicts(indices_NK: torch.Tensor, weights_NK: torch.Tensor) -> list[dict[int, float]]:
    return [dict(zip(i, w, strict=True)) for i, w in zip(indices_NK.tolist(), weights_NK.tolist(), strict=True)]


def assert_same(got: list[dict[int, float]], want: list[dict[int, float]]) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.keys() == other.keys()
        assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("k", [1, 2, 4, 8, EXPERTS])
def test_softmax_equals_plain_python(k):
    logits = random(TOKENS, EXPERTS, scale=2)
    chosen = select(SOFTMAX, logits, k)
    want = [plain_softmax(row, k) for row in logits.double().tolist()]
    assert_same(as_dicts(chosen, weigh(SOFTMAX, logits, chosen)), want)


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("mass_k", [8, 16, EXPERTS])
def test_a_wider_mass_leaves_weight_to_what_was_not_chosen(k, mass_k):
    logits = random(TOKENS, EXPERTS, scale=2)
    router = Router("softmax_topk", mass_k=mass_k)
    chosen = select(router, logits, k)
    assert torch.equal(chosen, select(SOFTMAX, logits, k)) and router.plain == SOFTMAX
    weights = weigh(router, logits, chosen)
    assert_same(as_dicts(chosen, weights), [plain_softmax(row, k, mass_k) for row in logits.double().tolist()])
    assert bool((weights.sum(-1) <= 1 + 1e-6).all()) and bool((weights.sum(-1) < 0.999).any()) == (k < mass_k)


def test_weights_that_are_not_renormalised_are_the_softmax_itself():
    logits = random(TOKENS, EXPERTS, scale=2)
    router = Router("softmax_topk", renormalise=False)
    chosen = select(router, logits, 4)
    want = [plain_softmax(row, 4, EXPERTS) for row in logits.double().tolist()]  # divided by the mass of all: by 1
    assert_same(as_dicts(chosen, weigh(router, logits, chosen)), want)
    wider = Router("softmax_topk", renormalise=False, mass_k=8)
    assert torch.equal(weigh(wider, logits, chosen), weigh(Router("softmax_topk", mass_k=8), logits, chosen))


@pytest.mark.parametrize("k", [1, 3, 8, 16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_sigmoid_equals_plain_python(k, with_bias):
    """The bias takes part in selecting groups and experts, never in the weights."""
    logits = random(TOKENS, EXPERTS, scale=2)
    bias = random(EXPERTS, seed=1, scale=0.3) if with_bias else None
    chosen = select(SIGMOID, logits, k, bias)
    want = [
        plain_sigmoid(row, k, bias.double().tolist() if bias is not None else None, 8, 4)
        for row in logits.double().tolist()
    ]
    assert_same(as_dicts(chosen, weigh(SIGMOID, logits, chosen)), want)


# -- transformers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [8, 4, 1])
def test_softmax_is_transformers_router_bit_for_bit(dtype, k):
    config = Qwen3_5MoeTextConfig(num_experts=EXPERTS, num_experts_per_tok=k, hidden_size=HIDDEN)
    router = Qwen3_5MoeTopKRouter(config).to(dtype)
    router.weight.data = random(EXPERTS, HIDDEN, seed=2).to(dtype)
    logits, weights, indices = router(random(TOKENS, HIDDEN).to(dtype))
    ours = select(SOFTMAX, logits, k)
    assert torch.equal(ours, indices)
    assert torch.equal(weigh(SOFTMAX, logits, ours).to(dtype), weights)


@pytest.mark.parametrize("k", [8, 4, 1])
def test_sigmoid_is_transformers_router(k):
    config = BailingHybridConfig(
        num_experts=EXPERTS, num_experts_per_tok=k, hidden_size=HIDDEN, n_group=8, topk_group=4, routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )  # fmt: skip
    router = BailingHybridTopkRouter(config)
    assert router.num_experts == EXPERTS and router.top_k == k
    router.weight.data = random(EXPERTS, HIDDEN, seed=2)
    router.e_score_correction_bias.copy_(random(EXPERTS, seed=3, scale=0.3))
    hidden = random(TOKENS, HIDDEN)
    logits, weights, indices = router(hidden)
    chosen = select(SIGMOID, logits, k, router.e_score_correction_bias)
    assert_same(as_dicts(chosen, weigh(SIGMOID, logits, chosen)), as_dicts(indices, weights))
    without = select(SIGMOID, logits, k)
    assert not torch.equal(without.sort(-1).values, chosen.sort(-1).values), "the bias must matter here"
    router.e_score_correction_bias.zero_()
    assert torch.equal(without.sort(-1).values, router(hidden)[2].sort(-1).values)


# -- properties --------------------------------------------------------------------------------------------------------


def test_a_smaller_k_keeps_the_best_of_the_larger_and_weights_sum_to_the_scaling():
    logits = random(TOKENS, EXPERTS, scale=2)
    for router in (SOFTMAX, SIGMOID):
        eight, four = (select(router, logits, k) for k in (8, 4))
        assert bool((multi_hot(four, EXPERTS) <= multi_hot(eight, EXPERTS)).all())
        left_out = scores(router, logits).gather(-1, eight).topk(4, largest=False).values
        assert bool((scores(router, logits).gather(-1, four).amin(-1) >= left_out.amax(-1)).all())
        weights = weigh(router, logits, four)
        assert weights.dtype == torch.float32
        torch.testing.assert_close(weights.sum(-1), torch.full((TOKENS,), router.scaling))


def test_extreme_logits_give_finite_weights():
    """Softmax of far-apart logits, and sigmoids that all underflow."""
    for logits in (torch.tensor([[1e4, -1e4, 0.0, 3.0] * 8]), torch.full((1, EXPERTS), -200.0)):
        for router in (SOFTMAX, SIGMOID):
            weights = weigh(router, logits, select(router, logits, 4))
            assert bool(torch.isfinite(weights).all())


def test_scores_are_float32_whatever_comes_in():
    logits = random(TOKENS, EXPERTS).bfloat16()
    for router in (SOFTMAX, SIGMOID):
        assert scores(router, logits).dtype == torch.float32
    torch.testing.assert_close(scores(SOFTMAX, logits).sum(-1), torch.ones(TOKENS))


def test_weights_are_differentiable_in_the_logits_and_the_selection_is_not():
    logits = random(4, EXPERTS).double().requires_grad_()
    for router in (SOFTMAX, SIGMOID):
        chosen = select(router, logits, 4)
        assert not chosen.requires_grad
        weight = random(4, 4, seed=5)
        (gradient,) = torch.autograd.grad((weigh(router, logits, chosen) * weight).sum(), logits)
        step = 1e-3
        for n, e in ((0, int(chosen[0, 0])), (2, int(chosen[2, 3]))):
            moved = [logits.detach().clone() for _ in range(2)]
            moved[0][n, e] += step
            moved[1][n, e] -= step
            high, low = (float((weigh(router, m, chosen) * weight).double().sum()) for m in moved)
            assert float(gradient[n, e]) == pytest.approx((high - low) / (2 * step), rel=1e-2, abs=1e-3)


def test_multi_hot_has_a_one_for_every_chosen_expert():
    indices = torch.tensor([[[0, 3], [2, 1]], [[7, 0], [5, 6]]])
    hot = multi_hot(indices, 8)
    assert hot.shape == (2, 2, 8) and hot.dtype == torch.float32
    for b in range(2):
        for t in range(2):
            assert [e for e in range(8) if hot[b, t, e] == 1.0] == sorted(indices[b, t].tolist())
    assert float(hot.sum()) == 8
