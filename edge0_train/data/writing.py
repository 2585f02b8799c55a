"""From prompts to text rows on disk: which prompts leave room for a completion, and shards that a stopped run finds again."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

from accelerate import PartialState

from edge0_train.config import Config
from edge0_train.data.chat import Chat
from edge0_train.data.complete import Writer
from edge0_train.data.prompts import Limit, Prompt
from edge0_train.data.rows import TextRow, read_rows, write_rows
from edge0_train.report import progress
from edge0_train.run import my_share
from edge0_train.stopping import leave_together, polled

SAMPLES = 8
"""Rows of a run that are written out as text, in its samples.jsonl."""


def prompt_limit(config: Config, directory: str) -> Limit | None:
    """Room for a completion within text.max_length, by the tokenizer of `directory`; None for a dry run that has none at hand."""
    if config.dry_run and not (Path(directory) / "tokenizer.json").is_file():
        return None
    chat = Chat(directory)
    return Limit(config.text.max_length, lambda prompt: len(chat.prompt_ids(prompt)))


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
