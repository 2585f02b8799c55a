"""How the nano teachers are optimised: Muon for matrices, AdamW for the rest, one schedule for both.

Shapes: E experts, N matrices of one shape, R rows, C columns.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import overload

import torch
from transformers import PreTrainedModel

MUON_LR, ADAMW_LR = 0.02, 3e-3  # at the first stage's peak
WARMUP = 50


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz, for tensors whose last two axes are matrices.

    As torch.optim.Muon (Nesterov, learning rate times sqrt(max(1, rows / columns)), no decay), which takes
    2-D tensors only; here each expert of an (E, R, C) tensor is its own matrix, and all matrices of one
    shape are orthogonalised in one batch, because on a CPU the small products are bound by dispatch.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": momentum})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter, all of which must have a gradient. Returns what `closure`, called before it, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(momentum, group["momentum"])
                by_shape[p.shape[-2:]].append((p, update.reshape(-1, *p.shape[-2:])))
            for (rows, columns), entries in by_shape.items():
                params, updates = zip(*entries, strict=True)
                step = orthogonalise(torch.cat(updates)) * -group["lr"] * math.sqrt(max(1, rows / columns))
                for p, part in zip(params, step.split([len(u) for u in updates]), strict=True):
                    p.add_(part.view_as(p))
        return loss


def orthogonalise(x_NRC: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """Quintic Newton-Schulz towards the nearest semi-orthogonal matrix (Jordan et al. 2024, Muon)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x_NRC.shape[-2] > x_NRC.shape[-1]
    x = x_NRC.mT if tall else x_NRC
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def build_optimisers(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Muon for matrices of at least 8 rows and columns, AdamW for embedding, head and all the rest."""
    vocabulary = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for p in model.parameters():
        is_matrix = p not in vocabulary and p.ndim >= 2 and min(p.shape[-2:]) >= 8
        (matrices if is_matrix else rest).append(p)
    adamw = torch.optim.AdamW(rest, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.0)
    return [Muon(matrices, lr=MUON_LR), adamw]


def lr_factor(step: int, steps: int) -> float:
    """Linear warm-up, then linear decay to zero, as a factor of the peak rate."""
    return min((step + 1) / WARMUP, 1.0) * (steps - step) / steps
