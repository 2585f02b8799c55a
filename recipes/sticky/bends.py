"""What might bend the curve further, tried on arms of it. None of this is in the package: each patches the student path.

+grow        SFT begins with half the bias, for half of its steps
+rise, +fall a bias of its own for each layer, from half to one and a half of the arm's, towards the last or towards the first
+tail.T      adaptive K: of the chosen experts those with less than T of the largest weight are dropped, on predicted inputs, in
refinement, SFT, on-policy and measuring; heads and stickiness still see all that were chosen
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from edge0_runtime.contract.tier import Sticky
from edge0_train.student import RoutingPass, StudentPath

READ = "experts_read"
"""Attribute of a path: {layer: [B, T, K]}, what is read of the last pass, where that isn't what ran."""
GROW = "grow"


@contextmanager
def bent(bend: str) -> Iterator[None]:
    """The student path as the bend has it, inside the block; "" and "grow" change nothing of it."""
    name, _, number = bend.partition(".")
    value = float(f"0.{number}") if number else 0.0
    patches: dict[str, Callable[[], Any]] = {
        "rise": lambda: mock.patch.object(StudentPath, "_chosen", _by_layer(rising=True)),
        "fall": lambda: mock.patch.object(StudentPath, "_chosen", _by_layer(rising=False)),
        "tail": lambda: mock.patch.object(StudentPath, "__init__", _dropping(value)),
    }
    if name not in patches:
        yield
        return
    with patches[name]():
        yield


def _by_layer(*, rising: bool) -> Callable[..., torch.Tensor]:
    plain = StudentPath._chosen

    def chosen(path: StudentPath, layer: int, own_NK: torch.Tensor, routing: RoutingPass) -> torch.Tensor:
        tier, consumers = path.tier, path.tier.consumers
        share = consumers.index(layer) / (len(consumers) - 1)
        sticky = Sticky(tier.router.sticky.bias * (0.5 + (share if rising else 1 - share)), tier.router.sticky.window)
        path.tier = replace(tier, router=replace(tier.router, sticky=sticky))
        try:
            return plain(path, layer, own_NK, routing)
        finally:
            path.tier = tier

    return chosen


def _dropping(threshold: float) -> Callable[..., None]:
    plain = StudentPath.__init__

    def init(path: StudentPath, *args: Any, **kwargs: Any) -> None:
        plain(path, *args, **kwargs)
        for layer in path.tier.consumers:
            path.router(layer).register_forward_hook(_tail_hook(path, layer, threshold))

    return init


def _tail_hook(path: StudentPath, layer: int, threshold: float) -> Callable[..., Any]:
    """Runs after the path's own hook, on what that has routed."""

    def drop(gate: Any, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        routing = path._pass
        if routing is None or routing.predicted_BT is None:
            return None
        logits_NE, weights_NK, indices_NK = output
        small_NK = weights_NK < threshold * weights_NK.max(-1, keepdim=True).values
        small_NK = small_NK & routing.predicted_BT.flatten()[:, None]
        kept_NK = weights_NK.masked_fill(small_NK, 0.0)
        kept_NK = kept_NK * (weights_NK.sum(-1, keepdim=True) / kept_NK.sum(-1, keepdim=True))
        # What reads nothing is counted nowhere: it becomes the likeliest one once more.
        first_NK = indices_NK.gather(-1, weights_NK.argmax(-1, keepdim=True)).expand_as(indices_NK)
        read_NK = torch.where(small_NK, first_NK, indices_NK)
        path.__dict__.setdefault(READ, {})[layer] = read_NK.unflatten(0, path._batch_shape)
        return logits_NE, kept_NK, indices_NK

    return drop
