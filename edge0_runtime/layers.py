"""A network's layers one by one, so that all chunks of a prompt go through a layer before the next one begins.

A chunk computes the same either way, since a layer's state is its own. What it saves is reading: a layer's experts serve all
chunks. mlx-lm's own loop says what each layer is called with (masks, positions), so no model code is repeated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Call = Callable[[mx.array], mx.array]
"""A layer's computing: its input [1, T, D] -> the next one's."""


class Layers:
    """Wrapped layers of mlx-lm's network, which do what they ever did but for the time of `calls`."""

    def __init__(self, network: Any) -> None:
        self._noted: list[tuple[mx.array, Call]] | None = None
        for layer in network.layers:
            layer.__class__ = self._noting(type(layer))

    def _noting(self, layer: type[nn.Module]) -> type[nn.Module]:
        layers = self  # which doesn't hold the network: a class is forgotten late

        class Layer(layer):  # type: ignore[misc,valid-type]  # which class it is, the family says
            def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
                call = super().__call__
                if layers._noted is None:
                    output: mx.array = call(x, *args, **kwargs)
                    return output
                layers._noted.append((x, lambda x: call(x, *args, **kwargs)))
                return x

        return Layer

    def calls(
        self, network: nn.Module, tokens_T: mx.array, kv: Sequence[Any], ahead: int
    ) -> tuple[mx.array, list[Call]]:
        """What the network would do with a chunk of a prompt, as (the first layer's input, one call for each layer).

        Args:
            kv: mlx-lm's prompt cache; the calls write into it. ahead: tokens that each layer will have processed before
                this chunk's turn, and that aren't in `kv` yet.
        """
        noted = self._noted = []
        try:
            with _moved(kv, ahead):
                network(tokens_T[None], cache=kv)
        finally:
            self._noted = None
        return noted[0][0], [call for _, call in noted]


@contextlib.contextmanager
def _moved(kv: Sequence[Any], tokens: int) -> Iterator[None]:
    """Masks and positions are made from where the entries of the prompt cache stand, if they stand anywhere."""
    placed = [entry for entry in kv if hasattr(entry, "offset")]
    for entry in placed:
        entry.offset += tokens
    try:
        yield
    finally:
        for entry in placed:
            entry.offset -= tokens
