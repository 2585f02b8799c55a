"""Random logits that a test can name by their seed."""

from __future__ import annotations

import torch


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """float32, normal with deviation `scale`."""
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
