"""What might bend the curve further, tried on arms of it. None of this is in the package: each patches the student path.

+grow        SFT begins with half the bias, for half of its steps
+rise, +fall a bias of its own for each layer, from half to one and a half of the arm's, towards the last or towards the first
+penalty.P   SFT's loss has P times the heads' probability of experts that did not run within the window, a layer and input
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
from edge0_train.data.rows import Batch
from edge0_train.objectives import student as student_objectives
from edge0_train.objectives.passes import MakePass, student_pass, summed_cross_entropy
from edge0_train.student import RoutingPass, StudentPath
from edge0_train.student.sticky import Choices, since_before

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
        "penalty": lambda: mock.patch.object(student_objectives, "sft_loss", _penalised(value)),
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


def _penalised(weight: float) -> Callable[..., tuple[torch.Tensor, dict[str, float]]]:
    def sft_loss(
        path: StudentPath, batch: Batch, predictability: float = 0.0, routing: MakePass = student_pass
    ) -> tuple[torch.Tensor, dict[str, float]]:
        chosen = routing(path, batch)
        value = summed_cross_entropy(path, batch, chosen)
        change = changes(path, chosen)
        return value + weight * change, {"loss_alone": float(value.detach()), "changes": float(change.detach())}

    return sft_loss


def changes(path: StudentPath, routing: RoutingPass) -> torch.Tensor:
    """The heads' probability of experts that did not run within the window, summed over layers and predicted inputs."""
    assert routing.predicted_BT is not None and routing.start_BT is not None
    total, router = torch.zeros(()), path.tier.router
    for layer in path.tier.consumers:
        logits_BTE, ran_BTK = routing.predictions[layer - 1], routing.executed[layer]
        nothing_BE = torch.full_like(logits_BTE[:, 0], router.sticky.window + 1, dtype=torch.int16)
        choices = Choices(logits_BTE, ran_BTK, routing.predicted_BT, routing.start_BT, nothing_BE)
        old_BTE = since_before(router, choices, ran_BTK)[:, :-1] > router.sticky.window
        at_BT = routing.predicted_BT
        total = total + (logits_BTE.softmax(-1) * old_BTE)[at_BT].sum()
    return total


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
