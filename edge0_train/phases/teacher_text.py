"""phase=teacher_text: the teacher completes prompts; phases 1 and 2 train on these rows.

python -m edge0_train phase=teacher_text tier=nano sample.prompts=4096
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from edge0_train.build import build_teacher
from edge0_train.config import Config
from edge0_train.data.chat import Chat
from edge0_train.data.prompts import Prompt, load_prompts
from edge0_train.data.rows import TextRow, read_rows, write_data, write_rows
from edge0_train.report import print_plan, progress
from edge0_train.run import Run, my_share
from edge0_train.student import Sampling, StudentPath, generate


def teacher_text(config: Config, run: Run) -> dict[str, Any]:
    """Write train.jsonl, held_out.jsonl and card.json into the run directory.

    Every batch of completions is a shard on disk with a seed of its own, so that a stopped run continues where it was and
    ends with the same rows.
    """
    prompts = load_prompts(
        config.text.prompts, train=config.sample.prompts, held_out=config.sample.eval_prompts, seed=config.seed
    )
    print_plan(
        config,
        {
            "prompts": f"{len(prompts.train)} train, {len(prompts.held_out)} held out (dropped: {prompts.dropped or 'none'})",
            "completions": f"at most {config.sample.max_new_tokens} tokens, temperature {config.sample.temperature}",
        },
    )
    if config.dry_run:
        return {}
    teacher, chat = build_teacher(config), Chat(config.teacher.directory)
    sides = {}
    for name, side in (("train", prompts.train), ("held_out", prompts.held_out)):
        sides[name] = _complete(config, run, teacher, chat, side, name)
    if not PartialState().is_main_process:
        return {}
    return {"card": write_data(run.directory, sides["train"], sides["held_out"], {"dropped_prompts": prompts.dropped})}


def _complete(
    config: Config, run: Run, teacher: StudentPath, chat: Chat, prompts: Sequence[Prompt], name: str
) -> list[TextRow]:
    """Complete `prompts` in order, each rank its share of the shards; a shard that is on disk is taken as it is."""
    return complete_shards(config, run.directory / "shards", teacher, chat, prompts, teacher.tier.base_k, name)


def complete_shards(
    config: Config,
    directory: Path,
    path: StudentPath,
    chat: Chat,
    prompts: Sequence[Prompt],
    native_k: int | None,
    name: str,
) -> list[TextRow]:
    """Rows of all prompts, in order; batches of them are files in `directory`, spread over the ranks."""
    directory.mkdir(parents=True, exist_ok=True)
    shards = {start: directory / f"{name}-{start:08d}.jsonl" for start in range(0, len(prompts), config.sample.batch)}
    missing = [start for start, shard in shards.items() if not shard.exists()]
    PartialState().wait_for_everyone()  # all ranks have seen the same files before any of them writes
    for start in progress(my_share(missing), f"{config.phase} {name}"):
        chosen = prompts[start : start + config.sample.batch]
        write_rows(shards[start], complete(config, path, chat, chosen, native_k, (name, start)))
    PartialState().wait_for_everyone()
    return [row for shard in shards.values() for row in read_rows(shard)]


def complete(
    config: Config,
    path: StudentPath,
    chat: Chat,
    prompts: Sequence[Prompt],
    native_k: int | None,
    stream: tuple[str, int],
) -> list[TextRow]:
    """Rows from prompts, sampled as `config.sample` says; `stream` and the run's seed fix the randomness."""
    ids = [chat.prompt_ids(prompt) for prompt in prompts]
    name, number = stream
    generator = torch.Generator(device=path.model.device)
    generator.manual_seed(zlib.crc32(f"{config.seed}/{name}/{number}".encode()))
    sample = config.sample
    completions = generate(
        path,
        ids,
        Sampling(sample.max_new_tokens, sample.temperature, sample.top_p),
        end_ids=chat.end_ids,
        pad_id=chat.pad_id,
        native_k=native_k,
        generator=generator,
    )
    return [
        TextRow(prompt_ids, done.ids, done.finish_reason, prompt.task, prompt.answer)
        for prompt_ids, done, prompt in zip(ids, completions, prompts, strict=True)
    ]
