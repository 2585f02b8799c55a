"""phase=teacher_text: the teacher completes prompts; phases 1 and 2 train on these rows.

    python -m edge0_train phase=teacher_text tier=nano sample.prompts=4096
    python -m edge0_train phase=teacher_text tier=35b sample.backend=vllm text.prompts=prompts.jsonl

Settings: text.* (prompts, split, column, max_length; max_dropped: when so many rows are unusable that the run stops), sample.*
(prompts, eval_prompts, batch, max_new_tokens, temperature, top_p, backend; max_truncated, max_repetitive: when the completions
are so bad that it stops).
Expected on nano, seed 0 (46 s of one core): 4,096 completions to train on and 256 held out, of which 251 are distinct; the
teacher's own greedy answers to those are right in .992.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from accelerate import PartialState

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.config import Config
from edge0_train.data.chat import Chat
from edge0_train.data.complete import PathWriter, VllmWriter, Writer
from edge0_train.data.counts import Rows
from edge0_train.data.health import check_rows
from edge0_train.data.prompts import Prompts
from edge0_train.data.rows import TextRow, distinct, write_data
from edge0_train.data.writing import SAMPLES, describe_prompts, prompts_of, write_shards
from edge0_train.plan import memory_plan
from edge0_train.report import print_plan
from edge0_train.run import Run
from edge0_train.teacher import (
    build_teacher,
    check_teacher,
    hash_tokenizer,
    identify_teacher,
    template_hash,
    vocabulary_cut,
)


def teacher_text(config: Config, run: Run) -> dict[str, Any]:
    """Write train.jsonl, held_out.jsonl, samples.jsonl and card.json into the run directory.

    Every batch of completions is a shard on disk with a seed of its own, so that a stopped run continues where it was and
    ends with the same rows.
    """
    sample, directory = config.sample, config.teacher.directory
    teacher = check_teacher(config)
    prompts = prompts_of(config, directory, train=sample.prompts, held_out=sample.eval_prompts, seed=config.seed)
    print_plan(config, {"teacher": teacher, **_plan(config, prompts)})
    if config.dry_run:
        return {}
    is_main = PartialState().is_main_process
    chat = Chat(directory)
    writer = _writer(config, chat)  # before the teacher's tens of GB are hashed: what fails, fails early
    card: dict[str, Any] = {
        "teacher": asdict(identify_teacher(directory)) if is_main else None,
        "tokenizer_sha256": hash_tokenizer(directory),
        "template_sha256": template_hash(directory),
        **prompts.to_dict(),
        "duplicate_rows": {},
        "health": {},
    }
    sides: dict[str, list[TextRow]] = {}
    for name, side in (("held_out", prompts.held_out), ("train", prompts.train)):  # the short one first: it fails early
        rows = write_shards(config, run.directory / "shards", writer, chat, side, name)
        if name == "held_out" and is_main:
            run.write_samples([chat.shown(row) for row in rows[:SAMPLES]])
        sides[name] = distinct(rows)
        card["duplicate_rows"][name] = len(rows) - len(sides[name])
        card["health"][name] = check_rows(rows, sample, f"teacher, {name}").to_dict()
    if not is_main:
        return {}
    return {"card": write_data(run.directory, sides["train"], sides["held_out"], card)}


def _plan(config: Config, prompts: Prompts) -> dict[str, str]:
    sample, train, held_out = config.sample, len(prompts.train), len(prompts.held_out)
    most = sample.max_new_tokens * (train + held_out)
    return {
        "prompts": describe_prompts(prompts),
        "completions": f"at most {sample.max_new_tokens:,} tokens each, {most:,} in all; temperature {sample.temperature},"
        f" top-p {sample.top_p}, {sample.batch} at a time, by {sample.backend}",
        **memory_plan(config, Rows.unwritten(config)),
    }


def _writer(config: Config, chat: Chat) -> Writer:
    """The teacher in the backend that `sample.backend` names."""
    if config.sample.backend == "transformers":
        teacher = build_teacher(config)
        return PathWriter(teacher, config.sample, chat.end_ids, chat.pad_id, teacher.tier.base_k)
    if PartialState().num_processes > 1:
        raise Edge0Error("sample.backend: vllm spreads over the GPUs itself; start teacher_text as one process")
    return VllmWriter.open(config, chat.end_ids, vocabulary_cut(config))
