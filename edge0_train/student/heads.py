"""Prerouter heads (docs/method.md 1.3): logits = fc2(gelu(fc1(x))) + linear_init(x), no biases, one head per owner layer.

x is the owner's features of the input before; token-aware heads also see the token being routed (`Tier.token_aware`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from edge0_runtime.contract.tier import Tier


class Head(nn.Module):
    """The head of one owner layer: x [..., F] -> logits over the next layer's experts [..., E]."""

    def __init__(self, inputs: int, width: int, experts: int):
        super().__init__()
        self.fc1 = nn.Linear(inputs, width, bias=False)
        self.fc2 = nn.Linear(width, experts, bias=False)
        self.linear_init = nn.Linear(inputs, experts, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="none")) + self.linear_init(x)


class PrerouterHeads(nn.Module):
    """All heads of a tier, in float32. Parameter names are the artifact's keys (`layers.<owner>.fc1.weight`, ...)."""

    def __init__(self, tier: Tier):
        super().__init__()
        self.layers = nn.ModuleDict(
            {str(n): Head(tier.head_input, tier.head_width, tier.num_experts) for n in tier.owners}
        )

    def forward(self, owner: int, features: torch.Tensor) -> torch.Tensor:
        """Logits [..., E] for layer `owner + 1`, from what its head sees [..., F] (`RoutingPass.features`)."""
        return self.layers[str(owner)](features)

    @torch.no_grad()
    def warm_start(self, router_weight: Callable[[int], torch.Tensor]) -> None:
        """Start from "apply the next layer's router to this hidden state" (docs/method.md 1.3).

        Args:
            router_weight: layer -> its router's weight [E, H].

        fc2 starts at zero so that the first logits are exactly the warm start's; fc1 keeps torch's random initialisation.
        Whatever else a head sees, the token included, starts without a say.
        """
        for owner, head in self.layers.items():
            assert isinstance(head, Head)
            weight_EH = router_weight(int(owner) + 1)
            head.linear_init.weight.zero_()
            head.linear_init.weight[:, : weight_EH.shape[1]] = weight_EH.float()
            head.fc2.weight.zero_()

    @torch.no_grad()
    def load(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Take the values of a prerouter artifact; the key set must match exactly (torch raises otherwise)."""
        self.load_state_dict({key: torch.from_numpy(np.asarray(value, np.float32)) for key, value in tensors.items()})

    def tensors(self) -> dict[str, np.ndarray]:
        """{artifact key: float32 array} of all heads."""
        return {key: value.detach().cpu().float().numpy() for key, value in self.state_dict().items()}
