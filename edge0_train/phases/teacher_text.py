"""phase=teacher_text: the teacher completes prompts; phases 1 and 2 train on these rows.

python -m edge0_train phase=teacher_text tier=nano sample.prompts=4096
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.build import build_teacher, check_tokenizer, hash_tokenizer
from edge0_train.config import Config
from edge0_train.data.chat import Chat
from edge0_train.data.complete import PathWriter, VllmWriter, Writer
from edge0_train.data.gates import check_rows
from edge0_train.data.prompts import Limit, Prompt, Prompts, load_prompts
from edge0_train.data.rows import TextRow, distinct, read_rows, write_data, write_rows
from edge0_train.report import print_plan, progress
from edge0_train.run import Run, my_share

SAMPLES = 8
"""Rows that are written out as text."""


def teacher_text(config: Config, run: Run) -> dict[str, Any]:
    """Write train.jsonl, held_out.jsonl, samples.jsonl and card.json into the run directory.

    Every batch of completions is a shard on disk with a seed of its own, so that a stopped run continues where it was and
    ends with the same rows.
    """
    sample = config.sample
    prompts = load_prompts(
        config.text.prompts,
        train=sample.prompts,
        held_out=sample.eval_prompts,
        seed=config.seed,
        limit=prompt_limit(config, config.teacher.directory),
    )
    print_plan(config, _plan(config, prompts))
    if config.dry_run:
        return {}
    chat = Chat(config.teacher.directory)
    writer = _writer(config, chat)
    sides: dict[str, list[TextRow]] = {}
    tokenizer = hash_tokenizer(config.teacher.directory)
    card: dict[str, Any] = {
        "tokenizer_sha256": tokenizer,
        "dropped_prompts": prompts.dropped,
        "duplicate_rows": {},
        "health": {},
    }
    for name, side in (("held_out", prompts.held_out), ("train", prompts.train)):  # the short one first: it fails early
        rows = write_shards(config, run.directory / "shards", writer, chat, side, name)
        if name == "held_out" and PartialState().is_main_process:
            run.write_samples([chat.shown(row) for row in rows[:SAMPLES]])
        sides[name] = distinct(rows)
        card["duplicate_rows"][name] = len(rows) - len(sides[name])
        card["health"][name] = check_rows(rows, sample, f"teacher, {name}").to_dict()
    if not PartialState().is_main_process:
        return {}
    return {"card": write_data(run.directory, sides["train"], sides["held_out"], card)}


def _plan(config: Config, prompts: Prompts) -> dict[str, str]:
    sample, train, held_out = config.sample, len(prompts.train), len(prompts.held_out)
    most = sample.max_new_tokens * (train + held_out)
    dropped = ", ".join(f"{count} {reason}" for reason, count in prompts.dropped.items()) or "none"
    return {
        "prompts": f"{train:,} train, {held_out:,} held out (dropped: {dropped})",
        "completions": f"at most {sample.max_new_tokens:,} tokens each, {most:,} in all; temperature {sample.temperature},"
        f" top-p {sample.top_p}, {sample.batch} at a time, by {sample.backend}",
    }


def prompt_limit(config: Config, directory: str) -> Limit | None:
    """Room for a completion within text.max_length, by the tokenizer of `directory`; None for a dry run that has none at hand."""
    if config.dry_run and not (Path(directory) / "tokenizer.json").is_file():
        return None
    chat = Chat(directory)
    return Limit(config.text.max_length, lambda prompt: len(chat.prompt_ids(prompt)))


def _writer(config: Config, chat: Chat) -> Writer:
    """The teacher in the backend that `sample.backend` names."""
    if config.sample.backend == "transformers":
        teacher = build_teacher(config)
        return PathWriter(teacher, config.sample, chat.end_ids, chat.pad_id, teacher.tier.base_k)
    if PartialState().num_processes > 1:
        raise Edge0Error("sample.backend: vllm spreads over the GPUs itself; start teacher_text as one process")
    check_tokenizer(config)
    return VllmWriter.open(config, chat.end_ids)


def write_shards(
    config: Config, directory: Path, writer: Writer, chat: Chat, prompts: Sequence[Prompt], name: str
) -> list[TextRow]:
    """Rows of all prompts, in order; batches of them are files in `directory`, spread over the ranks.

    A shard that is on disk is taken as it is. Its number, its name and the run's seed fix its randomness.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shards = {start: directory / f"{name}-{start:08d}.jsonl" for start in range(0, len(prompts), config.sample.batch)}
    missing = [start for start, shard in shards.items() if not shard.exists()]
    PartialState().wait_for_everyone()  # all ranks have seen the same files before any of them writes
    for start in progress(my_share(missing), f"{config.phase} {name}"):
        chosen = prompts[start : start + config.sample.batch]
        ids = [chat.prompt_ids(prompt) for prompt in chosen]
        completions = writer(ids, zlib.crc32(f"{config.seed}/{name}/{start}".encode()))
        rows = [
            TextRow(prompt_ids, done.ids, done.finish_reason, prompt.task, prompt.answer)
            for prompt_ids, done, prompt in zip(ids, completions, chosen, strict=True)
        ]
        write_rows(shards[start], rows)
    PartialState().wait_for_everyone()
    return [row for shard in shards.values() for row in read_rows(shard)]
