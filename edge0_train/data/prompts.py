"""Prompts: generated nano tasks, or the rows of a source (sources.py, conversations.py); all become `Prompt`s.

The generated tasks are `tasks` (the short ones), or `tasks:chain,add` for some by name.

Train and held-out prompts are split by a hash of the prompt's text, so that no setting of seed or order can move a prompt
from one side to the other.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import unquoted
from edge0_train.data import tasks
from edge0_train.data.conversations import COLUMNS, Prompt, Refused, read_prompt
from edge0_train.data.sources import read_source

EVAL_ONE_IN = 10
PLACES = 5
"""So many places of rows are named for each reason why rows were dropped."""
MOST_REASONS = 30
"""A template's sentences may quote the row: beyond so many reasons, they are counted as one."""
DUPLICATE = "duplicate prompt"


@dataclass(frozen=True)
class Prompts:
    """Train and held-out prompts, and what was lost on the way.

    Attributes:
        read: rows read of the source; 0 for generated tasks.
        dropped: {reason: how many rows}. places: {reason: the first of them}.
        ignored: {field: rows that have it, though it changes nothing that the model sees}.
    """

    train: list[Prompt]
    held_out: list[Prompt]
    dropped: dict[str, int]
    places: dict[str, list[str]] = field(default_factory=dict)
    ignored: dict[str, int] = field(default_factory=dict)
    read: int = 0

    def why_dropped(self) -> str:
        """`2 no messages (line 3, line 7), 1 duplicate prompt (line 9)`, or none."""
        return ", ".join(f"{count:,} {reason}{self._at(reason)}" for reason, count in self.dropped.items()) or "none"

    def _at(self, reason: str) -> str:
        places = self.places.get(reason, [])
        more = ", ..." if self.dropped[reason] > len(places) else ""
        return f" ({', '.join(places)}{more})" if places else ""

    def to_dict(self) -> dict[str, Any]:
        """For data cards and summaries."""
        return {
            "rows_read": self.read,
            "dropped_prompts": self.dropped,
            "dropped_at": self.places,
            "ignored_fields": self.ignored,
        }


@dataclass(frozen=True)
class Limit:
    """Prompts must be shorter than `tokens` (text.max_length), so that there is room for a completion.

    Attributes:
        length: a prompt's tokens; raises Refused where the chat template does not take it.
        ignored: names of a prompt's fields that change nothing.
    """

    tokens: int
    length: Callable[[Prompt], int]
    ignored: Callable[[Prompt], Sequence[str]] = lambda prompt: ()

    @property
    def reason(self) -> str:
        """Under what a prompt that is too long is counted in `Prompts.dropped`."""
        return f"prompt not below text.max_length={self.tokens}"

    def refusal(self, prompt: Prompt) -> str:
        """Why a prompt cannot be used; empty if it can."""
        try:
            return self.reason if self.length(prompt) >= self.tokens else ""
        except Refused as refused:
            return str(refused)


def load_prompts(
    source: str,
    *,
    train: int,
    held_out: int,
    seed: int,
    limit: Limit | None = None,
    split: str = "train",
    column: str = "",
    max_dropped: float = 1.0,
) -> Prompts:
    """At most `train` and `held_out` prompts from `source` (see the module's docstring).

    What `limit` refuses is counted as dropped, and its place goes to a later prompt of the source.

    Args:
        split: of a dataset that has several.
        column: where a row's conversation is; empty: the first of `COLUMNS` that is there.
        max_dropped: largest share of the rows read that may be unusable; what is too long or was there before does not count.

    Raises Edge0Error when the source cannot be read, too many rows are unusable, or either side gets no prompt.
    """
    kind, colon, names = source.partition(":")
    if kind == "tasks":
        prompts = _from_tasks(names.split(",") if colon else None, train, held_out, seed, limit)
    else:
        prompts = _from_rows(source, split, column, train, held_out, seed, limit, max_dropped)
    for name, side in (("train", prompts.train), ("held-out", prompts.held_out)):
        if not side and limit and limit.reason in prompts.dropped:
            raise Edge0Error(
                f"text.max_length: no {name} prompt is shorter than {limit.tokens} tokens"
                f" ({prompts.dropped[limit.reason]} prompts dropped); raise it"
            )
    if not prompts.train or not prompts.held_out:
        raise Edge0Error(
            f"text.prompts: {source!r} gave {len(prompts.train)} train and {len(prompts.held_out)} held-out prompts"
            f" (dropped: {prompts.why_dropped()}); each side needs at least one row with messages"
        )
    return prompts


MOST_DRAWS = 8
"""Times as many tasks as are wanted, before it is clear that too few of them fit."""


def _from_tasks(chosen: list[str] | None, train: int, held_out: int, seed: int, limit: Limit | None) -> Prompts:
    sides: list[list[Prompt]] = []
    dropped: dict[str, int] = {}
    for split, count in (("train", train), ("eval", held_out)):
        for draws in (count, MOST_DRAWS * count):  # a longer list of the same seed begins with the shorter one
            try:
                problems = tasks.problems(split, seed, draws, chosen)
            except ValueError as error:
                raise Edge0Error(f"text.prompts: tasks:{','.join(chosen or ())}: {error}") from error
            side, refused = _first((Prompt(tuple(tasks.messages(p)), p.task, p.answer) for p in problems), count, limit)
            if not refused or len(side) == count:
                break
        sides.append(side)
        for reason, times in refused.items():
            dropped[reason] = dropped.get(reason, 0) + times
    return Prompts(sides[0], sides[1], dropped)


def _first(prompts: Iterable[Prompt], count: int, limit: Limit | None) -> tuple[list[Prompt], Counter[str]]:
    """The first `count` prompts within the limit, and how many were refused on the way for what reason."""
    kept: list[Prompt] = []
    refused: Counter[str] = Counter()
    for prompt in prompts:
        if len(kept) == count:
            break
        reason = limit.refusal(prompt) if limit else ""
        if reason:
            refused[reason] += 1
        else:
            kept.append(prompt)
    return kept, refused


@dataclass
class _Losses:
    """What is dropped and ignored while rows are read; `harmless` are reasons that say nothing against a source."""

    harmless: tuple[str, ...]
    dropped: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)

    def drop(self, reason: str, place: str) -> None:
        if reason not in (*self.dropped, *self.harmless) and len(self.dropped) >= MOST_REASONS:
            reason = "other reasons"
        self.dropped[reason] += 1
        places = self.places.setdefault(reason, [])
        if len(places) < PLACES:
            places.append(place)

    @property
    def unusable(self) -> int:
        return sum(times for reason, times in self.dropped.items() if reason not in self.harmless)


def _from_rows(
    source: str,
    split: str,
    column: str,
    train: int,
    held_out: int,
    seed: int,
    limit: Limit | None,
    max_dropped: float,
) -> Prompts:
    sides: dict[bool, list[Prompt]] = {False: [], True: []}
    room = {False: train, True: held_out}
    losses = _Losses((DUPLICATE, limit.reason) if limit else (DUPLICATE,))
    seen: set[str] = set()
    columns: dict[str, Any] = {}
    count = 0
    for row in read_source(source, split):
        count += 1
        if isinstance(row.value, dict) and len(columns) < MOST_REASONS:
            columns = row.value | columns
        try:
            if row.problem:
                raise Refused(row.problem)
            prompt, ignored = read_prompt(row.value, column)
        except Refused as refused:
            losses.drop(str(refused), row.place)
            continue
        digest = hashlib.sha256(prompt.text.encode()).hexdigest()
        if digest in seen:
            losses.drop(DUPLICATE, row.place)
            continue
        seen.add(digest)
        is_held_out = int(digest, 16) % EVAL_ONE_IN == 0
        if len(sides[is_held_out]) < room[is_held_out]:
            reason = limit.refusal(prompt) if limit else ""
            if reason:
                losses.drop(reason, row.place)
            else:
                sides[is_held_out].append(prompt)
                losses.ignored.update([*ignored, *(limit.ignored(prompt) if limit else ())])
        if all(len(sides[side]) >= room[side] for side in sides):
            break
    _check_columns(source, column, columns)
    unusable = losses.unusable
    random.Random(seed).shuffle(sides[False])
    prompts = Prompts(sides[False], sides[True], dict(losses.dropped), losses.places, dict(losses.ignored), count)
    if unusable > max_dropped * count:
        raise Edge0Error(
            f"text.max_dropped: {unusable:,} of {count:,} rows of {source} ({unusable / count:.1%}) cannot be used, allowed"
            f" are {max_dropped:.1%} (dropped: {prompts.why_dropped()}); correct them, or set"
            f" text.max_dropped={math.ceil(100 * unusable / count) / 100}"
        )
    return prompts


def _check_columns(source: str, column: str, columns: dict[str, Any]) -> None:
    """Raise Edge0Error when no row has a column that prompts are read from; `columns` are those found, with a value."""
    wanted = (column,) if column else COLUMNS
    if not columns or columns.keys() & set(wanted):
        return
    named = ", ".join(unquoted(name) for name in columns)
    fitting = [name for name, value in columns.items() if isinstance(value, (str, list))]
    example = f", e.g. text.column={unquoted(fitting[0])}" if fitting else ""
    raise Edge0Error(
        f"text.{'column' if column else 'prompts'}: {source} has the columns {named}, but no {' and no '.join(wanted)}; name the"
        f" one that holds a text or a list of messages{example}"
    )
