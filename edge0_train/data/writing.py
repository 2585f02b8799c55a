"""From prompts to text rows on disk: which prompts leave room for a completion, and shards that a stopped run finds again."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

from accelerate import PartialState

from edge0_train.config import Config
from edge0_train.data.chat import Chat
from edge0_train.data.complete import Writer
from edge0_train.data.conversations import Prompt
from edge0_train.data.prompts import Limit, Prompts, load_prompts
from edge0_train.data.rows import TextRow, read_rows, write_rows
from edge0_train.report import progress
from edge0_train.run import my_share
from edge0_train.stopping import leave_together, polled

SAMPLES = 8
"""Rows of a run that are written out as text, in its samples.jsonl."""


def prompts_of(config: Config, directory: str, *, train: int, held_out: int, seed: int) -> Prompts:
    """`load_prompts` as `config.text` says, by the chat template of `directory`; a dry run may have none at hand."""
    text, limit = config.text, None
    if not config.dry_run or (Path(directory) / "tokenizer.json").is_file():
        chat = Chat(directory)
        limit = Limit(text.max_length, lambda prompt: len(chat.prompt_ids(prompt)), chat.ignored_fields)
    return load_prompts(
        text.prompts,
        train=train,
        held_out=held_out,
        seed=seed,
        limit=limit,
        split=text.split,
        column=text.column,
        max_dropped=text.max_dropped,
    )


def describe_prompts(prompts: Prompts) -> str:
    """How many there are, and what was dropped or ignored on the way, for a plan."""
    of = f" of {prompts.read:,} rows read ({sum(prompts.dropped.values()) / prompts.read:.1%})" if prompts.read else ""
    lines = [f"{len(prompts.train):,} train, {len(prompts.held_out):,} held out (dropped{of}: {prompts.why_dropped()})"]
    if prompts.ignored:
        fields = ", ".join(f"{name} ({count:,})" for name, count in prompts.ignored.items())
        lines.append(f"fields that the chat template has no place for (in so many rows): {fields}")
    return "\n".join(lines)


def write_shards(
    config: Config, directory: Path, writer: Writer, chat: Chat, prompts: Sequence[Prompt], name: str
) -> list[TextRow]:
    """Rows of all prompts, in order; batches of them are files in `directory`, spread over the ranks.

    A shard that is on disk is taken as it is. Its number, its name and the run's seed fix its randomness. Raises `Interrupted`
    after a signal and the shard at hand.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shards = {start: directory / f"{name}-{start:08d}.jsonl" for start in range(0, len(prompts), config.sample.batch)}
    missing = [start for start, shard in shards.items() if not shard.exists()]
    PartialState().wait_for_everyone()  # all ranks have seen the same files before any of them writes
    with polled() as stopped:
        for start in progress(my_share(missing), f"{config.phase} {name}"):
            if stopped():
                break
            chosen = prompts[start : start + config.sample.batch]
            ids = [chat.prompt_ids(prompt) for prompt in chosen]
            completions = writer(ids, zlib.crc32(f"{config.seed}/{name}/{start}".encode()))
            rows = [
                TextRow(prompt_ids, done.ids, done.finish_reason, prompt.task, prompt.answer)
                for prompt_ids, done, prompt in zip(ids, completions, chosen, strict=True)
            ]
            write_rows(shards[start], rows)
        kept = sum(shard.exists() for shard in shards.values())
        leave_together(stopped(), f"{kept} of {len(shards)} batches of {config.phase} {name} are kept")
    return [row for shard in shards.values() for row in read_rows(shard)]
