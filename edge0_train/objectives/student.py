"""The student path on text: completion-only cross-entropy, with what routing is to become (docs/method.md 2.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from edge0_runtime.contract.tier import Sticky, Tier
from edge0_train.build import Student
from edge0_train.config import Config, Heads
from edge0_train.data.rows import Batch, TextRow
from edge0_train.loop import Backward, Objective
from edge0_train.losses import head_kl
from edge0_train.objectives.passes import MakePass, mean_loss, student_pass, summed_cross_entropy, windows
from edge0_train.student import PrerouterHeads, RoutingPass, StudentPath
from edge0_train.student.router import scores
from edge0_train.student.sticky import Choices, never, since_before

HELD_OUT_LOSS = "held_out_loss"
"""The metric that `optim.patience` goes by."""


def student_objective(
    config: Config,
    student: Student,
    rows: Sequence[TextRow],
    held_out: Sequence[Batch] = (),
    routing: MakePass = student_pass,
) -> Objective:
    """The LoRA, and with `heads.joint_lr` the heads, on the completions of `rows`.

    Args:
        held_out: what the held-out loss is measured on, and watched; none: it is not.
        routing: `native_pass` is for a student without heads.
    """
    path = student.path
    heads = joint_parameters(config, path.heads)

    def loss(batch: Batch, backward: Backward) -> dict[str, float]:
        value, said = sft_loss(path, batch, config.heads, routing)
        backward(value)
        return said

    return Objective(
        trainable=lora_parameters(path) | heads,
        window=windows(config, student, rows),
        loss=loss,
        evaluate=(lambda step: {HELD_OUT_LOSS: mean_loss(path, held_out, routing)}) if held_out else None,
        rates=dict.fromkeys(heads, config.heads.joint_lr),
        watch=HELD_OUT_LOSS if held_out else "",
    )


def lora_parameters(path: StudentPath) -> dict[str, nn.Parameter]:
    """The trainable LoRA factors by name."""
    return {name: p for name, p in path.model.named_parameters() if "lora_" in name and p.requires_grad}


def joint_parameters(config: Config, heads: PrerouterHeads | None) -> dict[str, nn.Parameter]:
    """With `heads.joint_lr`: the parameters of all heads whose output routes, made trainable; else none."""
    if heads is None or not config.heads.joint_lr:
        return {}
    used = tuple(f"layers.{consumer - 1}." for consumer in config.tier.consumers)
    parameters = {name: p for name, p in heads.named_parameters() if name.startswith(used)}
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    return parameters


def sft_loss(
    path: StudentPath, batch: Batch, heads: Heads, routing: MakePass = student_pass
) -> tuple[torch.Tensor, dict[str, float]]:
    """`completion_loss` with the routing's predictability and changes weighed in, and what is to be logged beside it."""
    chosen = listening(routing(path, batch), heads.predictability)
    value = summed_cross_entropy(path, batch, chosen)
    total, said = weigh_predictability(path, chosen, heads.predictability, value, {})
    if not heads.change_penalty:
        return total, said
    return _weighed(total, said, heads.change_penalty, "changes", routing_changes(path, chosen))


def _weighed(
    loss: torch.Tensor, said: dict[str, float], weight: float, name: str, term: torch.Tensor
) -> tuple[torch.Tensor, dict[str, float]]:
    """(loss + weight * term, `said` with the loss before any term, and the term by its name)."""
    parts = {"loss_alone": said.get("loss_alone", float(loss.detach())), name: float(term.detach())}
    return loss + weight * term, said | parts


# -- predictability ----------------------------------------------------------------------------------------------------


def listening(routing: RoutingPass, predictability: float) -> RoutingPass:
    """The same pass; with a weight, one that `weigh_predictability` can use."""
    routing.keep_logits = predictability > 0
    return routing


def weigh_predictability(
    path: StudentPath, routing: RoutingPass, weight: float, loss: torch.Tensor, said: dict[str, float]
) -> tuple[torch.Tensor, dict[str, float]]:
    """(loss + weight * `routing_divergence`, `said` with both parts); as they are when the weight is 0.

    Both are sums that the loop divides by the window's labels: the weight is against a label's loss, and no cut of the window
    changes it.
    """
    if not weight:
        return loss, said
    return _weighed(loss, said, weight, "routing_kl", routing_divergence(path, routing))


def routing_divergence(path: StudentPath, routing: RoutingPass) -> torch.Tensor:
    """How unpredictable a pass's routing is: `head_kl` of the heads from the routers that they replaced (docs/method.md 2.2).

    Summed over consumer layers and predicted inputs. The target is a consumer's own router, with its expert bias, on the
    student's own hidden state, so the gradient has two ways into a LoRA: through that router's logits, and through the
    features that the head was given.

    Args:
        routing: a predicted pass of `path` that has run, with its routers' logits kept (`RoutingPass.keep_logits`).
    """
    tier, at_BT, total = path.tier, routing.predicted_BT, torch.zeros(())
    for layer in tier.consumers:
        head_NE, router_NE = routing.predictions[layer - 1][at_BT], routing.router_logits[layer][at_BT]
        divergence = head_kl(tier.router, head_NE, router_NE, tier.k, path.expert_bias(layer))
        total = total.to(head_NE.device) + divergence
    return total


def describe_predictability(config: Config) -> str:
    """For the plan; empty when off."""
    weight = config.heads.predictability
    return f"; loss + {weight} x KL(router || head), summed over {len(config.tier.consumers)} layers" if weight else ""


# -- changes -----------------------------------------------------------------------------------------------------------

PLAIN_WINDOW = 2
"""`heads.change_penalty` on a tier without stickiness: inputs back that count as a moment ago."""


def routing_changes(path: StudentPath, routing: RoutingPass) -> torch.Tensor:
    """How much a pass's heads want experts that their layers did not run a moment ago, which are read (docs/method.md 2.2).

    Their share of a head's scores, summed over consumer layers and predicted inputs. A moment ago: within
    `tier.router.sticky.window`, or `PLAIN_WINDOW`. What ran is no variable: the gradient goes through the heads' logits.

    Args:
        routing: a predicted pass of `path`, from an empty cache, that has run.
    """
    assert routing.predicted_BT is not None and routing.start_BT is not None
    at_BT, total = routing.predicted_BT, torch.zeros(())
    router = replace(path.tier.router, sticky=Sticky(window=change_window(path.tier)))
    for layer in path.tier.consumers:
        logits_BTE, ran_BTK = routing.predictions[layer - 1], routing.executed[layer]
        choices = Choices(logits_BTE, ran_BTK, at_BT, routing.start_BT, never(router, logits_BTE[:, 0]))
        new_BTE = since_before(router, choices, ran_BTK)[:, :-1] > router.sticky.window
        scores_BTE = scores(router, logits_BTE)
        share_BTE = scores_BTE / scores_BTE.sum(-1, keepdim=True)
        total = total.to(share_BTE.device) + (share_BTE * new_BTE)[at_BT].sum()
    return total


def change_window(tier: Tier) -> int:
    """How many inputs back `heads.change_penalty` looks."""
    return tier.router.sticky.window or PLAIN_WINDOW


def describe_changes(config: Config) -> str:
    """For the plan; empty when off."""
    weight = config.heads.change_penalty
    return f"; loss + {weight} x share of experts unused for {change_window(config.tier)} tokens" if weight else ""
