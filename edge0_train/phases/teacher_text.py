"""phase=teacher_text: the teacher completes prompts; phases 1 and 2 train on these rows.

    python -m edge0_train phase=teacher_text tier=nano sample.prompts=4096
    python -m edge0_train phase=teacher_text tier=35b sample.backend=vllm text.prompts=prompts.jsonl

Settings: text.prompts, text.max_length, sample.* (prompts, eval_prompts, batch, max_new_tokens, temperature, top_p, backend; and
max_truncated, max_repetitive: when rows are so bad that the run stops).
Expected on nano, seed 0 (46 s of one core): 4,096 completions to train on and 256 held out, of which 251 are distinct; the
teacher's own greedy answers to those are right in .992.
"""

from __future__ import annotations

from typing import Any

from accelerate import PartialState

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.build import build_teacher, check_tokenizer, hash_tokenizer
from edge0_train.config import Config
from edge0_train.data.chat import Chat
from edge0_train.data.complete import PathWriter, VllmWriter, Writer
from edge0_train.data.counts import Rows
from edge0_train.data.health import check_rows
from edge0_train.data.prompts import Prompts, load_prompts
from edge0_train.data.rows import TextRow, distinct, write_data
from edge0_train.data.writing import SAMPLES, prompt_limit, write_shards
from edge0_train.plan import memory_plan
from edge0_train.report import print_plan
from edge0_train.run import Run


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
        **memory_plan(config, Rows.unwritten(config)),
    }


def _writer(config: Config, chat: Chat) -> Writer:
    """The teacher in the backend that `sample.backend` names."""
    if config.sample.backend == "transformers":
        teacher = build_teacher(config)
        return PathWriter(teacher, config.sample, chat.end_ids, chat.pad_id, teacher.tier.base_k)
    if PartialState().num_processes > 1:
        raise Edge0Error("sample.backend: vllm spreads over the GPUs itself; start teacher_text as one process")
    check_tokenizer(config)
    return VllmWriter.open(config, chat.end_ids)
