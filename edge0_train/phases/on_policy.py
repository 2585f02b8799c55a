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
from safetensors.torch import load_file, save_file

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import atomic_replace
from edge0_runtime.contract.provenance import DataSource
from edge0_train.build import Student, build_student, build_teacher, hash_files, write_output
from edge0_train.config import Config
from edge0_train.data.chat import Chat
from edge0_train.data.prompts import Prompt, load_prompts
from edge0_train.data.rows import IGNORE, Batch, TextRow, collate, read_rows, shuffled, write_rows
from edge0_train.loop import Problem, train
from edge0_train.losses import chunked, reverse_kl, topk_with_tail
from edge0_train.phases.student_sft import lora_parameters
from edge0_train.phases.teacher_text import complete
from edge0_train.report import print_plan
from edge0_train.run import Run
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
    tier, optim, inputs, rounds = config.tier, config.optim, config.inputs, config.on_policy.rounds
    if not inputs.prerouter or not inputs.lora:
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
    student = build_student(config, prerouter=inputs.prerouter, lora=inputs.lora)
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
        DataSource(hash_files(sorted(run.directory.glob("round-*/rollout.jsonl"))), rows * rounds),
        {"prerouter": student.prerouter, "lora": student.lora},
    )
    return {**result, "rounds": [_describe(read_rows(_round(run, n) / "rollout.jsonl")) for n in range(rounds)]}


def _round(run: Run, number: int) -> Path:
    directory = run.directory / f"round-{number:03d}"
    directory.mkdir(exist_ok=True)
    return directory


def _rollout(config: Config, run: Run, student: Student, prompts: list[Prompt], number: int) -> list[TextRow]:
    """The round's completions by the student as it is now; a rollout that is on disk is taken as it is."""
    file = _round(run, number) / "rollout.jsonl"
    if not file.exists():
        rows: list[TextRow] = []
        for start in range(0, len(prompts), config.sample.batch):
            chosen = prompts[start : start + config.sample.batch]
            rows += complete(config, student.path, student.chat, chosen, None, (f"round-{number}", start))
        write_rows(file, rows)
    return read_rows(file)


@torch.no_grad()
def _score(
    config: Config, run: Run, teacher: StudentPath, pad_id: int, rollout: list[TextRow], number: int
) -> list[Scored]:
    """The teacher's top-k and tail at every completion token, cached as safetensors; native at its published K."""
    file = _round(run, number) / "scores.safetensors"
    if not file.exists():
        tensors: dict[str, torch.Tensor] = {}
        for start in range(0, len(rollout), config.sample.batch):
            batch = collate(rollout[start : start + config.sample.batch], pad_id, teacher.model.device)
            hidden = teacher.hidden(batch.input_ids_BT, teacher.native(teacher.tier.base_k), use_cache=False)
            at_BT = batch.labels_BT != IGNORE
            parts = [
                topk_with_tail(teacher.model.lm_head(part), config.on_policy.top_k)
                for part in hidden.last_hidden_state[at_BT].split(1024)
            ]
            lengths = at_BT.sum(1).tolist()
            columns = [torch.cat(column).cpu().split(lengths) for column in zip(*parts, strict=True)]
            for row, (ids, logp, tail) in enumerate(zip(*columns, strict=True), start):
                tensors |= {
                    f"{row}.ids": ids.contiguous(),
                    f"{row}.logp": logp.contiguous(),
                    f"{row}.tail": tail.contiguous(),
                }
        with atomic_replace(file) as temporary:
            save_file(tensors, str(temporary))
    stored = load_file(str(file))
    return [Scored(stored[f"{i}.ids"], stored[f"{i}.logp"], stored[f"{i}.tail"]) for i in range(len(rollout))]


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
    output = path.hidden(batch.input_ids_BT, path.predicted(batch.decoded_BT), use_cache=False)
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
