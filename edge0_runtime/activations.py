"""What a sequence and its passes take in memory beside the weights, from a tier's shapes alone.

The numbers of copies are measured: `benchmarks/activations.py` compares what follows from them with the allocator's peaks by part
of a layer. T tokens of a prompt's chunk, C tokens of context.
"""

from __future__ import annotations

from edge0_runtime.contract.family import Kept
from edge0_runtime.contract.tier import Tier

FLOAT_BYTES = 4
KV_STEP = 256  # tokens by which mlx-lm's key-value caches grow
SLICE = 8  # tokens of a prompt that a recurrence takes at once, where each one's state is kept meanwhile
PENDING = 10  # operations that mlx lets wait on a CPU; what they return is allocated already


def context_bytes(tier: Tier, tokens: int, *, float32: bool) -> int:
    """Of keys and values of a context, as the caches allocate them, and of the recurrent states, which have one size."""
    kept = _kept(tier)
    floats = sum(layer.token * (tokens + KV_STEP - 1) + layer.inputs for layer in kept)
    return floats * _float_bytes(float32) + FLOAT_BYTES * sum(layer.state for layer in kept)


def token_bytes(tier: Tier, *, float32: bool) -> int:
    """Of keys and values of one token of context."""
    return sum(layer.token for layer in _kept(tier)) * _float_bytes(float32)


def pass_bytes(tier: Tier, tokens: int, context: int, cast_bytes: int) -> int:
    """Peak of a pass of T tokens at the end of C: that of the largest part of a layer, for one is computed after the other.

    Args:
        cast_bytes: of the largest scales and biases that a matmul casts for itself.
    """
    hidden, arch = tier.hidden_size, tier.architecture
    rows = tokens * tier.k  # sorted input, output, weighted output and their sum; gate and up
    floats = [rows * (4 * hidden + 2 * tier.expert_width)]
    for layer, kept in enumerate(_kept(tier)):
        if kept.state:
            floats.append((min(tokens, SLICE) + PENDING) * kept.state + 2 * tokens * hidden)
            continue
        shapes = tier.layout.layer_modules(arch, layer)
        mixer = next(iter(shapes)).partition(".")[0]
        wide = sum(outputs for path, (_, outputs) in shapes.items() if path.startswith(f"{mixer}.")) - hidden
        attention = 4 * tokens * wide + (kept.scores * tokens + 2 * kept.unfolded) * context
        floats.append(attention + kept.token * context)  # a cache that grows is copied
    streams = 2 * tokens * hidden
    return max(FLOAT_BYTES * (max(floats) + streams), cast_bytes)


def _kept(tier: Tier) -> list[Kept]:
    return [tier.layout.kept(tier.architecture, layer) for layer in range(tier.architecture["num_hidden_layers"])]


def _float_bytes(float32: bool) -> int:
    return FLOAT_BYTES if float32 else 2
