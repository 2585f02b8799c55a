"""What a sequence leaves to go on from: arrays, apart from any model or running step.

mlx-lm's prompt cache has an entry a layer, of two kinds. Attention's has keys and values, a row a token, which never change once
they are written; so the snapshots of one conversation share them, each adding its own (`Rows`). A recurrence's or convolution's
has a state of one size, which nobody can take a token back from: each snapshot has its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map


@dataclass(frozen=True, eq=False)
class Rows:
    """Keys and values of a stretch of tokens, behind those of `before`.

    Attributes:
        before: of the tokens before; None at the beginning.
        stop: the token before which they end, counted from the sequence's beginning.
        parts: of every entry of the prompt cache: (keys, values), each [1, heads, tokens, width] or, quantised, several arrays of
            such rows; None for an entry that has a state.
    """

    before: Rows | None
    stop: int
    parts: tuple[Any, ...]

    @cached_property
    def nbytes(self) -> int:
        """Memory that these take, without those of `before`."""
        return nbytes(self.parts)

    def chain(self) -> Iterator[Rows]:
        """From these back to the beginning."""
        rows: Rows | None = self
        while rows is not None:
            yield rows
            rows = rows.before

    def whole(self) -> Rows:
        """The same rows in one stretch, evaluated."""
        first, *others = reversed(list(self.chain()))
        parts = []
        for part, *following in zip(first.parts, *(rows.parts for rows in others), strict=True):
            parts.append(None if part is None else tree_map(_behind_each_other, part, *following))
        mx.eval(parts)
        return Rows(None, self.stop, tuple(parts))


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A sequence between two passes: continuing from it gives the same bits as going on did. All arrays are evaluated.

    Attributes:
        rows: of all tokens so far. states: of every entry of the prompt cache: its arrays, None where it has rows.
        index, trail, features, since: of the last step. ran: layer -> [1, K], its last token's experts.
    """

    rows: Rows
    states: tuple[Any, ...]
    index: int
    trail: int | None
    features: Any
    since: mx.array | None
    ran: Mapping[int, np.ndarray]

    @property
    def tokens(self) -> int:
        """How many the sequence had processed."""
        return self.rows.stop

    @cached_property
    def own_nbytes(self) -> int:
        """Memory that it takes beside its rows."""
        return nbytes([self.states, self.features, self.since])

    @property
    def nbytes(self) -> int:
        """Memory that it takes, with all rows back to the beginning."""
        return self.own_nbytes + sum(rows.nbytes for rows in self.rows.chain())


def _behind_each_other(*stretches: mx.array) -> mx.array:
    return mx.concatenate(list(stretches), axis=-2)


def has_rows(entry: Any) -> bool:
    """Whether an entry of the prompt cache is attention's."""
    return hasattr(entry, "keys")


def part_of(entry: Any, start: int) -> Any:
    """A copy of what an entry holds, evaluated: its rows from token `start` on, or its state."""
    if has_rows(entry):
        # A copy, since a slice would keep the whole block alive that mlx-lm's cache has grown to.
        part = tree_map(lambda rows: mx.contiguous(rows[..., start : entry.offset, :]), (entry.keys, entry.values))
    else:
        part = _same([array for array in entry.cache if array is not None])
    mx.eval(part)
    return part


def restore(kv: Sequence[Any], snapshot: Snapshot) -> None:
    """Put the prompt cache, which is empty, where the snapshot was taken."""
    whole = snapshot.rows.whole()
    for entry, rows, state in zip(kv, whole.parts, snapshot.states, strict=True):
        if has_rows(entry):
            (entry.keys, entry.values), entry.offset = _same(rows), snapshot.tokens
        else:
            entry.cache = _same(state)


def arrays_of(tree: Any) -> list[mx.array]:
    """All arrays in lists and tuples."""
    leaves: list[tuple[str, Any]] = tree_flatten(tree)  # type: ignore[assignment]
    return [value for _, value in leaves if isinstance(value, mx.array)]


def nbytes(tree: Any) -> int:
    """Of all arrays in lists and tuples."""
    return sum(array.nbytes for array in arrays_of(tree))


def rows_nbytes(snapshots: Iterable[Snapshot]) -> int:
    """Of the rows that keep all these snapshots, each stretch counted once."""
    return sum({id(rows): rows.nbytes for snapshot in snapshots for rows in snapshot.rows.chain()}.values())


def _same(tree: Any) -> Any:
    """The same arrays as other objects: mlx-lm's caches write into theirs."""
    return tree_map(lambda array: mx.array(array), tree)
