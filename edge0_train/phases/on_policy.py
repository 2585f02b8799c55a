"""phase=on_policy: the student writes, the teacher scores, the LoRA trains with reverse KL (method.md 2.3).

    python -m edge0_train phase=on_policy tier=35b

Rounds of rollout -> score -> train. Every stage of a round is on disk (`round-000/`), so that student and teacher need not be
in memory together and a stopped run continues with the very rollouts it had.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from safetensors.torch import load_file, save

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import atomic_replace
from edge0_runtime.contract.provenance import DataSource
from edge0_train.adapters import hash_files, input_path, write_output
from edge0_train.build import Student, build_student, build_teacher
from edge0_train.config import Config
from edge0_train.data.chat import Chat
from edge0_train.data.prompts import Prompt, load_prompts
from edge0_train.data.rows import IGNORE, Batch, TextRow, collate, read_rows, shuffled
from edge0_train.loop import Problem, train
from edge0_train.losses import chunked, reverse_kl, topk_with_tail
from edge0_train.phases.student_sft import lora_parameters
from edge0_train.phases.teacher_text import complete_shards
from edge0_train.report import print_plan
from edge0_train.run import Run, my_share
from edge0_train.student import StudentPath, lora_tensors


@dataclass(frozen=True)
class Scored:
    """The teacher's view of one row's completion: top-k ids [C, S], log-probabilities [C, S], log tail [C]."""

    ids_CS: torch.Tensor
    logp_CS: torch.Tensor
    log_tail_C: torch.Tensor


@dataclass(frozen=True)
class ScoredBatch:
    """A batch of rollouts with the teacher's scores at every completion token, in the batch's order."""

    batch: Batch
    scored: Scored

    @property
    def valid(self) -> int:
        return self.batch.valid

    @property
    def tokens(self) -> int:
        return self.batch.tokens


def on_policy(config: Config, run: Run) -> dict[str, Any]:
    """Train the LoRA on its own completions; base and heads stay frozen."""
    tier, optim, rounds = config.tier, config.optim, config.on_policy.rounds
    prerouter, lora = input_path(config, "prerouter"), input_path(config, "lora")
    if not prerouter or not lora:
        raise Edge0Error("inputs: on_policy starts from heads and a LoRA; set inputs.prerouter and inputs.lora")
    if optim.steps % rounds:
        raise Edge0Error(f"optim.steps: {optim.steps} is not a multiple of on_policy.rounds={rounds}")
    steps, rows = optim.steps // rounds, optim.rows * optim.steps // rounds
    prompts = load_prompts(config.text.prompts, train=rows * rounds, held_out=1, seed=config.seed + 1)
    if len(prompts.train) < rows * rounds:
        raise Edge0Error(
            f"text.prompts: {len(prompts.train)} prompts, but {rounds} rounds of {rows} rows need {rows * rounds};"
            " lower optim.steps or optim.rows"
        )
    student = build_student(config, prerouter=prerouter, lora=lora)
    trainable = lora_parameters(student.path)
    print_plan(
        config,
        {
            "rounds": f"{rounds} of {rows} completions (temperature {config.sample.temperature}) and {steps} steps",
            "loss": f"reverse KL on the teacher's top {config.on_policy.top_k} and one tail bucket",
            "teacher": config.teacher.directory,
            "trainable": f"{sum(p.numel() for p in trainable.values()):,} parameters",
        },
    )
    if config.dry_run:
        return {}
    teacher = build_teacher(config)
    teacher_ends = Chat(config.teacher.directory).end_ids
    if student.chat.end_ids != teacher_ends:
        raise Edge0Error(
            f"teacher: end tokens {teacher_ends} are not the student's {student.chat.end_ids}; use one tokenizer"
        )

    @functools.lru_cache(maxsize=1)
    def prepared(number: int) -> tuple[list[TextRow], list[Scored]]:
        rollout = _rollout(config, run, student, prompts.train[number * rows : (number + 1) * rows], number)
        return rollout, _score(config, run, teacher, student.chat.pad_id, rollout, number)

    def window(step: int) -> list[ScoredBatch]:
        number, step_in_round = divmod(step, steps)
        rollout, scores = prepared(number)  # at a round's first step: written with the weights of this moment
        order = shuffled(len(rollout), optim.rows, config.seed + number)
        return _window(rollout, scores, order(step_in_round), optim.micro_rows, student)

    result = train(run, optim, Problem(trainable, window, functools.partial(_loss, student.path)))
    write_output(
        config,
        "lora",
        lora_tensors(student.path.model, tier),
        student.base,
        result,
        DataSource(hash_files(sorted(run.directory.glob("round-*/rollout-*.jsonl"))), rows * rounds),
        {"prerouter": student.prerouter, "lora": student.lora},
        prerouter_sha256=student.prerouter.sha256 if student.prerouter else None,
    )
    return {**result, "rounds": [_describe(_stored(run, n)) for n in range(rounds)]}


def _round(run: Run, number: int) -> Path:
    directory = run.directory / f"round-{number:03d}"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _stored(run: Run, number: int) -> list[TextRow]:
    """The rollout of a round that is on disk."""
    return [row for file in sorted(_round(run, number).glob("rollout-*.jsonl")) for row in read_rows(file)]


def _rollout(config: Config, run: Run, student: Student, prompts: list[Prompt], number: int) -> list[TextRow]:
    """The round's completions by the student as it is now; a rollout that is on disk is taken as it is."""
    return complete_shards(config, _round(run, number), student.path, student.chat, prompts, None, f"rollout-{number}")


def _score(
    config: Config, run: Run, teacher: StudentPath, pad_id: int, rollout: list[TextRow], number: int
) -> list[Scored]:
    """The teacher's view of every row, cached as safetensors batch by batch, each rank its share of the batches."""
    files = {
        n: _round(run, number) / f"scores-{n:08d}.safetensors" for n in range(0, len(rollout), config.sample.batch)
    }
    missing = [start for start, file in files.items() if not file.exists()]
    PartialState().wait_for_everyone()  # all ranks have seen the same files before any of them writes
    for start in my_share(missing):
        batch = collate(rollout[start : start + config.sample.batch], pad_id, teacher.model.device)
        with atomic_replace(files[start]) as temporary:
            temporary.write_bytes(save(_teacher_scores(teacher, batch, config.on_policy.top_k)))
    PartialState().wait_for_everyone()
    scores = []
    for file in files.values():
        stored = load_file(str(file))
        lengths = stored["lengths"].tolist()
        columns = [stored[f.name].split(lengths) for f in dataclasses.fields(Scored)]
        scores += [Scored(*row) for row in zip(*columns, strict=True)]
    return scores


@torch.no_grad()
def _teacher_scores(teacher: StudentPath, batch: Batch, top_k: int) -> dict[str, torch.Tensor]:
    """Top-k and tail at every completion token of the batch, row after row; the teacher is native at its published K."""
    output = teacher.hidden(batch.input_ids_BT, teacher.native(teacher.tier.base_k), use_cache=False)
    at_BT = batch.labels_BT != IGNORE
    parts = [topk_with_tail(teacher.model.lm_head(part), top_k) for part in output.last_hidden_state[at_BT].split(1024)]
    columns = [torch.cat(column).cpu().contiguous() for column in zip(*parts, strict=True)]
    names = [f.name for f in dataclasses.fields(Scored)]
    return dict(zip(names, columns, strict=True)) | {"lengths": at_BT.sum(1).cpu()}


def _window(
    rollout: list[TextRow], scores: list[Scored], indices: np.ndarray, micro_rows: int, student: Student
) -> list[ScoredBatch]:
    """The micro-batches of one step."""
    device = student.path.model.device
    parts = [indices[i : i + micro_rows] for i in range(0, len(indices), micro_rows)]
    return [
        ScoredBatch(
            collate([rollout[i] for i in part], student.chat.pad_id, device), _join([scores[i] for i in part], device)
        )
        for part in parts
    ]


def _loss(path: StudentPath, micro: ScoredBatch) -> tuple[torch.Tensor, dict[str, float]]:
    """Summed reverse KL on the student path, and the teacher's mass on its top-k."""
    batch, scored = micro.batch, micro.scored
    output = path.hidden(batch.input_ids_BT, path.predicted(batch.decoded_BT, batch.start_BT), use_cache=False)
    hidden_NH = output.last_hidden_state[batch.labels_BT != IGNORE]
    value = chunked(reverse_kl, hidden_NH, path.model.lm_head, scored.ids_CS, scored.logp_CS, scored.log_tail_C)
    return value, {"teacher_mass": float(scored.logp_CS.exp().sum())}


def _join(scores: list[Scored], device: torch.device) -> Scored:
    """Scores of several rows, one after the other, as `labels != IGNORE` flattens them."""
    fields = [f.name for f in dataclasses.fields(Scored)]
    return Scored(*(torch.cat([getattr(s, name) for s in scores]).to(device) for name in fields))


def _describe(rollout: list[TextRow]) -> dict[str, float]:
    """Mean length and truncated share of a round, for the summary."""
    return {
        "mean_length": round(sum(len(row.completion_ids) for row in rollout) / len(rollout), 2),
        "truncated": round(sum(row.finish_reason == "length" for row in rollout) / len(rollout), 4),
    }
