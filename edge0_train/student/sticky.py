"""Sticky prerouting in torch (docs/method.md 1.7): a predicted choice gets a bonus for experts that ran a moment ago.

Which experts run at input t then depends on those of t-1, so a whole sequence is no single top-k. Two ways give it exactly,
bit for bit the same: `one_by_one` walks along the sequence, `fixed_point` recomputes all of it at once until nothing changes.
The first is faster on a CPU, the second on a device where every call costs the same.

What ran a moment ago is one number an expert, `since`: how many inputs ago it last ran, 1 for the one before; capped at one more
than the window, which is as good as never. Shapes as in the package: B rows, T tokens, E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from edge0_runtime.contract.tier import Router
from edge0_train.student.router import select


@dataclass(frozen=True)
class Choices:
    """What one layer is to choose from, over a pass.

    Attributes:
        predicted_BTE: the head's logits. own_BTK: what the layer's own gate chooses.
        by_head_BT: bool; inputs that the head routes. The others run what their own gate chooses.
        first_BT: bool; inputs before which nothing ran: a document's first.
        since_BE: before the pass's first input.
    """

    predicted_BTE: torch.Tensor
    own_BTK: torch.Tensor
    by_head_BT: torch.Tensor
    first_BT: torch.Tensor
    since_BE: torch.Tensor


def never(router: Router, like_BE: torch.Tensor) -> torch.Tensor:
    """`since` where nothing ran yet: int16, of the shape and on the device of `like_BE`."""
    return torch.full_like(like_BE, router.sticky.window + 1, dtype=torch.int16)


@torch.no_grad()
def choose(router: Router, choices: Choices) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts that run, int64 [B, T, K], and `since` after the pass, int16 [B, E]."""
    way = one_by_one if choices.predicted_BTE.device.type == "cpu" else fixed_point
    return way(router, choices)


def one_by_one(router: Router, choices: Choices) -> tuple[torch.Tensor, torch.Tensor]:
    """`choose`, input by input."""
    ran, since_BE = [], choices.since_BE
    k, unseen = choices.own_BTK.shape[-1], never(router, since_BE)
    by_head_T = choices.by_head_BT.any(0).tolist()
    for t, by_head in enumerate(by_head_T):
        since_BE = torch.where(choices.first_BT[:, t, None], unseen, since_BE)
        ran_BK = choices.own_BTK[:, t]
        if by_head:
            sticky_BK = _select(router, choices.predicted_BTE[:, t], since_BE, k)
            ran_BK = torch.where(choices.by_head_BT[:, t, None], sticky_BK, ran_BK)
        ran.append(ran_BK)
        since_BE = (since_BE + 1).clamp_max(router.sticky.window + 1).scatter(-1, ran_BK, 1)
    return torch.stack(ran, 1), since_BE


def fixed_point(router: Router, choices: Choices) -> tuple[torch.Tensor, torch.Tensor]:
    """`choose`, all inputs at once, as often as it takes.

    Every iteration makes at least one more input right, and those before it stay: it ends where `one_by_one` does.
    """
    k, by_head_BT1 = choices.own_BTK.shape[-1], choices.by_head_BT[..., None]
    ran_BTK = torch.where(by_head_BT1, _flat_select(router, choices.predicted_BTE, None, k), choices.own_BTK)
    while True:
        since_BTE = since_before(router, choices, ran_BTK)
        again_BTK = _flat_select(router, choices.predicted_BTE, since_BTE[:, :-1], k)
        again_BTK = torch.where(by_head_BT1, again_BTK, choices.own_BTK)
        if torch.equal(again_BTK, ran_BTK):
            return ran_BTK, since_BTE[:, -1]
        ran_BTK = again_BTK


def since_before(router: Router, choices: Choices, ran_BTK: torch.Tensor) -> torch.Tensor:
    """`since` before every input, and after the last: int16 [B, T + 1, E]."""
    never_yet = router.sticky.window + 1
    rows, tokens, experts = choices.predicted_BTE.shape
    input_T1 = torch.arange(tokens + 1, device=ran_BTK.device)[:, None]
    ran_BTE = torch.zeros(rows, tokens, experts, dtype=torch.bool, device=ran_BTK.device).scatter_(-1, ran_BTK, True)
    ran_at_BTE = torch.where(ran_BTE, input_T1[:-1], -never_yet)
    # What was carried in ran at inputs before 0; from a document's first input on, nothing before it counts.
    last_BTE = torch.cat([-choices.since_BE[:, None].long(), ran_at_BTE], dim=1).cummax(1).values
    began_BT = torch.where(choices.first_BT, input_T1[:-1, 0], -never_yet).cummax(1).values
    began_BT = torch.cat([began_BT, began_BT[:, -1:]], dim=1)
    since_BTE = torch.where(last_BTE >= began_BT[..., None], input_T1 - last_BTE, never_yet)
    return since_BTE.clamp_max(never_yet).to(torch.int16)


def _flat_select(router: Router, predicted_BTE: torch.Tensor, since_BTE: torch.Tensor | None, k: int) -> torch.Tensor:
    flat = None if since_BTE is None else since_BTE.flatten(0, 1)
    return _select(router, predicted_BTE.flatten(0, 1), flat, k).view(*predicted_BTE.shape[:2], k)


def _select(router: Router, predicted_NE: torch.Tensor, since_NE: torch.Tensor | None, k: int) -> torch.Tensor:
    if since_NE is None:
        return select(router, predicted_NE, k)
    recent_NE = (since_NE <= router.sticky.window).to(predicted_NE.dtype)
    return select(router, predicted_NE + router.sticky.bias * recent_NE, k)
