"""Losses in chunks of tokens: as the dense ones in value and gradient, without their memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from edge0_train.losses import (
    chunked,
    cross_entropy,
    forward_kl,
    reverse_kl,
    reverse_kl_no_tail,
    sampled_token,
    token_logp,
    topk_with_tail,
)
from tests.train.random_logits import random

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
