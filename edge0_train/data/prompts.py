"""Prompts: generated nano tasks, a JSONL or Parquet file, or a dataset by name; all become `Prompt`s.

The generated tasks are `tasks` (the short ones), or `tasks:chain,add` for some by name.

Train and held-out prompts are split by a hash of the prompt's text, so that no setting of seed or order can move a prompt
from one side to the other.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import load_dataset

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.data import tasks

EVAL_ONE_IN = 10


@dataclass(frozen=True)
class Prompt:
    """A conversation up to and including the last user turn; `answer` is empty when nothing can be checked."""

    messages: tuple[dict[str, str], ...]
    task: str = ""
    answer: str = ""


@dataclass(frozen=True)
class Prompts:
    """Train and held-out prompts, and what was dropped on the way: {reason: count}."""

    train: list[Prompt]
    held_out: list[Prompt]
    dropped: dict[str, int]


@dataclass(frozen=True)
class Limit:
    """Prompts must be shorter than `tokens` (text.max_length), so that there is room for a completion."""

    tokens: int
    length: Callable[[Prompt], int]

    @property
    def reason(self) -> str:
        """Under what a refused prompt is counted in `Prompts.dropped`."""
        return f"prompt not below text.max_length={self.tokens}"

    def refuses(self, prompt: Prompt) -> bool:
        """Whether a prompt leaves no room below `tokens`."""
        return self.length(prompt) >= self.tokens


def load_prompts(source: str, *, train: int, held_out: int, seed: int, limit: Limit | None = None) -> Prompts:
    """At most `train` and `held_out` prompts from `source` (see the module's docstring).

    What `limit` refuses is counted as dropped, and its place goes to a later prompt of the source.

    Raises Edge0Error when the source cannot be read or yields no usable prompt on either side.
    """
    kind, colon, names = source.partition(":")
    if kind == "tasks":
        prompts = _from_tasks(names.split(",") if colon else None, train, held_out, seed, limit)
    else:
        prompts = _split(_rows(source), train, held_out, seed, limit)
    for name, side in (("train", prompts.train), ("held-out", prompts.held_out)):
        if not side and limit and limit.reason in prompts.dropped:
            raise Edge0Error(
                f"text.max_length: no {name} prompt is shorter than {limit.tokens} tokens"
                f" ({prompts.dropped[limit.reason]} prompts dropped); raise it"
            )
    if not prompts.train or not prompts.held_out:
        raise Edge0Error(
            f"text.prompts: {source!r} gave {len(prompts.train)} train and {len(prompts.held_out)} held-out prompts"
            f" (dropped: {prompts.dropped or 'none'}); each side needs at least one row with messages"
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
        if limit and refused:
            dropped[limit.reason] = dropped.get(limit.reason, 0) + refused
    return Prompts(sides[0], sides[1], dropped)


def _first(prompts: Iterable[Prompt], count: int, limit: Limit | None) -> tuple[list[Prompt], int]:
    """The first `count` prompts within the limit, and how many were refused on the way."""
    kept: list[Prompt] = []
    refused = 0
    for prompt in prompts:
        if len(kept) == count:
            break
        if limit and limit.refuses(prompt):
            refused += 1
        else:
            kept.append(prompt)
    return kept, refused


def _rows(source: str) -> Iterator[Any]:
    """Rows of a file or dataset, streamed."""
    suffix = Path(source).suffix
    kind = {".jsonl": "json", ".parquet": "parquet"}.get(suffix)
    if kind and not Path(source).is_file():
        raise Edge0Error(f"text.prompts: {source} does not exist; give a .jsonl or .parquet file, or a dataset's name")
    try:
        if kind:
            yield from load_dataset(kind, data_files=source, split="train", streaming=True)
        else:
            yield from load_dataset(source, split="train", streaming=True)
    except Exception as error:  # datasets raises many types; all mean that the source cannot be read
        raise Edge0Error(
            f"text.prompts: {source!r} cannot be loaded ({str(error) or type(error).__name__}); give tasks, a file, or a dataset"
        ) from error


def _split(rows: Iterable[Any], train: int, held_out: int, seed: int, limit: Limit | None) -> Prompts:
    sides: dict[bool, list[Prompt]] = {False: [], True: []}
    room = {False: train, True: held_out}
    dropped: dict[str, int] = {}
    seen: set[str] = set()
    for reason, prompt in _prompts(rows):
        if prompt is None:
            dropped[reason] = dropped.get(reason, 0) + 1
            continue
        text = json.dumps(prompt.messages, ensure_ascii=False)
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest in seen:
            dropped["duplicate prompt"] = dropped.get("duplicate prompt", 0) + 1
            continue
        seen.add(digest)
        is_held_out = int(digest, 16) % EVAL_ONE_IN == 0
        if len(sides[is_held_out]) < room[is_held_out]:
            if limit and limit.refuses(prompt):
                dropped[limit.reason] = dropped.get(limit.reason, 0) + 1
            else:
                sides[is_held_out].append(prompt)
        if all(len(sides[side]) >= room[side] for side in sides):
            break
    random.Random(seed).shuffle(sides[False])
    return Prompts(sides[False], sides[True], dropped)


def _prompts(rows: Iterable[Any]) -> Iterator[tuple[str, Prompt | None]]:
    """(reason, None) for every unusable row, ("", prompt) for the others."""
    for row in rows:
        messages = row.get("messages")
        if not isinstance(messages, list) or not messages:
            yield "no messages", None
            continue
        if not all(isinstance(m, dict) and isinstance(m.get("content"), str) and m.get("role") for m in messages):
            yield "a message without role or content", None
            continue
        users = [i for i, m in enumerate(messages) if m["role"] == "user"]
        if not users:
            yield "no user turn", None
            continue
        turns = tuple({"role": m["role"], "content": m["content"]} for m in messages[: users[-1] + 1])
        yield "", Prompt(turns, str(row.get("task") or ""), str(row.get("answer") or ""))
