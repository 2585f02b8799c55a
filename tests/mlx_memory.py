"""What MLX holds, for tests that compare before and after."""

import gc

import mlx.core as mx


def mlx_bytes() -> int:
    """Bytes of the arrays that something still refers to.

    The collector runs first: the garbage of an earlier test, collected between two looks, would pass for memory given back.
    """
    gc.collect()
    return mx.get_active_memory()
