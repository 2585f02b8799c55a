"""What a sequence and its passes take in memory beside the weights, from a tier's shapes alone.

The numbers of copies are measured: `benchmarks/activations.py` compares what follows from them with the allocator's peaks by part
of a layer. T tokens of a prompt's chunk, C tokens of context.
"""

from __future__ import annotations

from edge0_runtime.contract.family import Kept
from edge0_runtime.contract.tier import Tier

FLOAT_BYTES = 4
KV_STEP = 256  # tokens by which mlx-lm's key-value caches grow
KV_GROUP = 64  # of quantised keys and values, numbers that share a scale and a bias: mlx-lm's default
SLICE = 8  # tokens of a prompt that a recurrence takes at once, where each one's state is kept meanwhile
PENDING = 11  # operations that mlx lets wait on a CPU; what they return is allocated already


def context_bytes(tier: Tier, tokens: int, *, float32: bool, kv_bits: int | None = None) -> int:
    """Of keys and values of a context, as the caches allocate them, and of the recurrent states, which have one size."""
    return token_bytes(tier, tokens + KV_STEP - 1, float32=float32, kv_bits=kv_bits) + state_bytes(
        tier, float32=float32
    )


def token_bytes(tier: Tier, tokens: int = 1, *, float32: bool, kv_bits: int | None = None) -> int:
    """Of keys and values of tokens of context; `kv_bits`: of each number, where they are quantised."""
    numbers, float_bytes = tokens * sum(layer.token for layer in _kept(tier)), _float_bytes(float32)
    if kv_bits is None:
        return numbers * float_bytes
    return numbers * kv_bits // 8 + numbers // KV_GROUP * 2 * float_bytes


def state_bytes(tier: Tier, *, float32: bool) -> int:
    """Of convolutions' last inputs and recurrent states, which take the same after every token."""
    kept = _kept(tier)
    return sum(layer.inputs for layer in kept) * _float_bytes(float32) + FLOAT_BYTES * sum(
        layer.state for layer in kept
    )


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
