"""Prerouter heads in torch (docs/method.md 1.3): one module a kind of `contract/heads.py`, one head per owner layer.

A head's input x is what it sees of the input before, and, if it is told, of the input being routed itself (`HeadInput.of`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from edge0_runtime.contract.heads import HEAD_INPUTS, TOKEN_NORM_EPS
from edge0_runtime.contract.tier import Tier

# -- inputs ------------------------------------------------------------------------------------------------------------


def inputs_before(tier: Tier, known: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What heads see of an input when they route the next one: [B, T, F], float32, in the tier's order.

    Args:
        known: {name: value} of an owner's inputs: hidden [B, T, H], routing and previous [B, T, E].
    """
    names = [name for name in tier.head_inputs if HEAD_INPUTS[name].of == "before"]
    return torch.cat([known[name].float() for name in names], dim=-1)


def inputs_of_token(tier: Tier, embed: nn.Module, input_ids_BT: torch.Tensor) -> torch.Tensor | None:
    """What heads see of the very input that they route: [B, T, F], float32; None if that is nothing."""
    makers = {"token": lambda: _unit_rms(embed(input_ids_BT).float())}
    made = [makers[name]() for name in tier.head_inputs if HEAD_INPUTS[name].of == "token"]
    return torch.cat(made, dim=-1) if made else None


def _unit_rms(embedding_BTH: torch.Tensor) -> torch.Tensor:
    return embedding_BTH * torch.rsqrt(embedding_BTH.square().mean(-1, keepdim=True) + TOKEN_NORM_EPS)


# -- kinds -------------------------------------------------------------------------------------------------------------


class Head(nn.Module):
    """One head: x [..., F] -> logits over the next layer's experts [..., E]. Parameters are its kind's tensors, `<part>.weight`.

    A kind is made of (width of the input F, `Tier.head_width`, experts E).
    """

    def start_from(self, router_EH: torch.Tensor, hidden: slice) -> None:
        """Make the logits those of a router at the columns `hidden` of x, in a way that all parts can still be trained."""
        raise NotImplementedError


class MlpHead(Head):
    """logits = fc2(gelu(fc1(x))) + linear_init(x), no biases."""

    def __init__(self, inputs: int, width: int, experts: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, width, bias=False)
        self.fc2 = nn.Linear(width, experts, bias=False)
        self.linear_init = nn.Linear(inputs, experts, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X [..., F] -> logits [..., E]."""
        logits: torch.Tensor = self.fc2(F.gelu(self.fc1(x), approximate="none")) + self.linear_init(x)
        return logits

    def start_from(self, router_EH: torch.Tensor, hidden: slice) -> None:
        """fc2 starts at zero; fc1 keeps torch's random initialisation."""
        self.linear_init.weight.zero_()
        self.linear_init.weight[:, hidden] = router_EH.float()
        self.fc2.weight.zero_()


HEADS: dict[str, Callable[[int, int, int], Head]] = {"mlp": MlpHead}
"""By the names of `HEAD_KINDS`."""


class PrerouterHeads(nn.Module):
    """All heads of a tier, in float32. Parameter names are the artifact's keys (`layers.<owner>.<part>.weight`)."""

    def __init__(self, tier: Tier) -> None:
        super().__init__()
        self.tier = tier
        self.layers = nn.ModuleDict(
            {str(n): HEADS[tier.head](tier.head_input, tier.head_width, tier.num_experts) for n in tier.owners}
        )

    def forward(self, owner: int, features: torch.Tensor) -> torch.Tensor:
        """Logits [..., E] for layer `owner + 1`, from what its head sees [..., F] (`RoutingPass.features`)."""
        logits: torch.Tensor = self.layers[str(owner)](features)
        return logits

    @torch.no_grad()
    def warm_start(self, router_weight: Callable[[int], torch.Tensor]) -> None:
        """Start from "apply the next layer's router to this hidden state" (docs/method.md 1.3).

        Args:
            router_weight: layer -> its router's weight [E, H].

        The first logits are exactly the warm start's: whatever else a head sees, the token included, starts without a say.
        """
        for owner, head in self.layers.items():
            assert isinstance(head, Head)
            head.start_from(router_weight(int(owner) + 1), self.tier.head_columns["hidden"])

    @torch.no_grad()
    def load(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Take the values of a prerouter artifact; the key set must match exactly (torch raises otherwise)."""
        self.load_state_dict({key: torch.from_numpy(np.asarray(value, np.float32)) for key, value in tensors.items()})

    def tensors(self) -> dict[str, np.ndarray]:
        """{artifact key: float32 array} of all heads."""
        return {key: value.detach().cpu().float().numpy() for key, value in self.state_dict().items()}
