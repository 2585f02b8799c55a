"""Sticky prerouting in MLX (docs/method.md 1.7): which experts ran a moment ago, and their bonus; the twin of training's.

What ran a moment ago is one number an expert, `since`: how many inputs ago it last ran, 1 for the one before; capped at one more
than the window, which is as good as never. All arrays may be lazy. Shapes: C consumers, T tokens, E experts, K experts per token.
"""

from __future__ import annotations

import mlx.core as mx

from edge0_runtime.contract.tier import Sticky, Tier


def never(tier: Tier) -> mx.array:
    """`since` of the tier's consumers where nothing ran yet: uint8 [C, E]."""
    return mx.full((len(tier.consumers), tier.num_experts), tier.router.sticky.window + 1, dtype=mx.uint8)


def after(sticky: Sticky, since_CE: mx.array, ran_CTK: mx.array) -> mx.array:
    """`since` after a pass in which `ran_CTK` ran; what ran before its last `window` tokens need not be given."""
    one = mx.array(1, mx.uint8)
    for t in range(ran_CTK.shape[1]):
        older_CE = mx.minimum(since_CE + one, sticky.window + 1)
        since_CE = mx.put_along_axis(older_CE, ran_CTK[:, t], one, axis=-1)
    return since_CE


def bonus(sticky: Sticky, since_CE: mx.array) -> mx.array:
    """float32 [C, E], what a prediction's logits gain."""
    return (since_CE <= sticky.window) * mx.array(sticky.bias)
