"""What requests share that begin alike: where a prompt is cut, and the snapshots of sequences at such cuts (docs/serve.md).

mlx-lm's own cache of prompts trims what it has to the length that is wanted, which a recurrent state doesn't allow, and knows
nothing of the prerouter's state.
"""
