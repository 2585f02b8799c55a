"""Edge0's runtime: an int4 mixture-of-experts model on MLX, its experts on disk, routed by trained heads.

    from edge0_runtime.engine import Engine, Token    load a model directory, generate tokens
    from edge0_runtime.contract.errors import Edge0Error     what a user can act on

The contract (`edge0_runtime.contract`) is shared with training and needs neither MLX nor torch; so this
module imports nothing.
"""
