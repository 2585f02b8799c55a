"""Choices that the command line offers; here so that its help needs no MLX."""

from __future__ import annotations

from typing import Literal, get_args

Arm = Literal["prerouter", "on_demand", "history", "lookahead", "same_token", "resident"]
ARMS: tuple[Arm, ...] = get_args(Arm)
IO_THREADS = 4
MAX_IO_THREADS = 64
