"""phase=on_policy: the student writes, the teacher scores, the LoRA trains with reverse KL (docs/method.md 2.3).

    python -m edge0_train phase=on_policy tier=35b
    python -m edge0_train phase=on_policy tier=35b on_policy.loss=forward_kl    # a control, see losses.ON_POLICY_LOSSES

Rounds of rollout -> score -> train. Every stage of a round is on disk (`round-000/`), so that student and teacher need not be
in memory together and a stopped run continues with the very rollouts it had.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.provenance import DataSource
from edge0_train.adapters import describe_inputs, hash_files, input_path, write_output
from edge0_train.build import Student, build_student, check_tokenizer, sketch_student
from edge0_train.config import Config
from edge0_train.data.complete import PathWriter
from edge0_train.data.gates import RowHealth, check_rows
from edge0_train.data.prompts import Prompt, load_prompts
from edge0_train.data.rows import IGNORE, Batch, TextRow, collate, read_rows, shuffled
from edge0_train.loop import Backward, Problem, train
from edge0_train.losses import ON_POLICY_LOSSES, chunked, mass_on
from edge0_train.phases.scoring import Scored, Scorer, join, score
from edge0_train.phases.student_sft import (
    SAMPLES,
    describe_predictability,
    lora_parameters,
    student_routing,
    weigh_predictability,
)
from edge0_train.phases.teacher_text import prompt_limit, write_shards
from edge0_train.plan import Rows, training_plan
from edge0_train.report import print_plan
from edge0_train.run import Run
from edge0_train.student import StudentPath, lora_tensors


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
    sample = config.sample
    if config.on_policy.loss == "sampled_token" and (sample.temperature, sample.top_p) != (1.0, 1.0):
        raise Edge0Error(
            f"sample: temperature {sample.temperature} and top_p {sample.top_p}; on_policy.loss=sampled_token estimates"
            " with what the student itself would write: set both to 1"
        )
    if optim.steps % rounds:
        raise Edge0Error(f"optim.steps: {optim.steps} is not a multiple of on_policy.rounds={rounds}")
    steps, rows = optim.steps // rounds, optim.rows * optim.steps // rounds
    prompts = load_prompts(
        config.text.prompts,
        train=rows * rounds,
        held_out=1,
        seed=config.seed + 1,
        limit=prompt_limit(config, config.base.directory),
    )
    if len(prompts.train) < rows * rounds:
        raise Edge0Error(
            f"text.prompts: {len(prompts.train)} prompts (dropped: {prompts.dropped or 'none'}), but {rounds} rounds of {rows}"
            f" rows need {rows * rounds}; lower optim.steps or optim.rows"
        )
    if config.dry_run:
        print_plan(config, _plan(config, sketch_student(config, lora=True, heads=True)))
        return {}
    prerouter, lora = input_path(config, "prerouter"), input_path(config, "lora")
    if not prerouter or not lora:
        raise Edge0Error("inputs: on_policy starts from heads and a LoRA; set inputs.prerouter and inputs.lora")
    check_tokenizer(config)
    student = build_student(config, prerouter=prerouter, lora=lora)
    trainable = lora_parameters(student.path)
    print_plan(config, _plan(config, student.path))
    scorer = Scorer(config, student)

    @functools.lru_cache(maxsize=1)
    def prepared(number: int) -> tuple[list[TextRow], list[Scored]]:
        rollout = _rollout(config, run, student, prompts.train[number * rows : (number + 1) * rows], number)
        first = RowHealth.of(_stored(run, 0)) if number else None
        check_rows(rollout, sample, f"student, round {number}", before=first)
        return rollout, score(config, _round(run, number), scorer, student.chat.pad_id, rollout)

    def window(step: int) -> list[ScoredBatch]:
        number, step_in_round = divmod(step, steps)
        rollout, scores = prepared(number)  # at a round's first step: written with the weights of this moment
        order = shuffled(len(rollout), optim.rows, config.seed + number)
        return _window(rollout, scores, order(step_in_round), optim.micro_rows, student)

    @functools.lru_cache(maxsize=1)
    def about(number: int) -> dict[str, float]:
        return {f"rollout_{name}": value for name, value in RowHealth.of(_stored(run, number)).to_dict().items()}

    def loss(micro: ScoredBatch, backward: Backward) -> dict[str, float]:
        value, said = _loss(student.path, config.on_policy.loss, micro, config.heads.predictability)
        backward(value)
        return said

    result = train(run, optim, Problem(trainable, window, loss, evaluate=lambda done: about((done - 1) // steps)))
    if PartialState().is_main_process:
        run.write_samples([student.chat.shown(row) for row in _stored(run, rounds - 1)[:SAMPLES]])
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
    return {**result, "rounds": [RowHealth.of(_stored(run, n)).to_dict() for n in range(rounds)]}


def _plan(config: Config, path: StudentPath) -> dict[str, str]:
    """The phase's plan; `path` may be on the meta device. No row is written yet: all are taken to be as long as allowed."""
    optim, rounds = config.optim, config.on_policy.rounds
    count, longest = optim.rows * optim.steps, config.text.max_length - 1
    labels = float(min(longest, config.sample.max_new_tokens))
    rows = Rows(count, 0, longest, labels, longest, {}, assumed=True)
    return {
        "inputs": describe_inputs(config),
        "scoring": "the teacher stays loaded"
        if config.teacher.resident
        else "the teacher is loaded for each round's scores",
        "rounds": f"{rounds} of {count // rounds} completions (temperature {config.sample.temperature}) and"
        f" {optim.steps // rounds} steps",
        "loss": f"{config.on_policy.loss}, the teacher's top {config.on_policy.top_k}"
        + describe_predictability(config),
        **training_plan(config, path, lora_parameters(path), rows, through_base=True),
    }


def _round(run: Run, number: int) -> Path:
    directory = run.directory / f"round-{number:03d}"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _stored(run: Run, number: int) -> list[TextRow]:
    """The rollout of a round that is on disk."""
    return [row for file in sorted(_round(run, number).glob("rollout-*.jsonl")) for row in read_rows(file)]


def _rollout(config: Config, run: Run, student: Student, prompts: list[Prompt], number: int) -> list[TextRow]:
    """The round's completions by the student as it is now; a rollout that is on disk is taken as it is."""
    writer = PathWriter(student.path, config.sample, student.chat.end_ids, student.chat.pad_id, native_k=None)
    return write_shards(config, _round(run, number), writer, student.chat, prompts, f"rollout-{number}")


def _window(
    rollout: list[TextRow], scores: list[Scored], indices: np.ndarray, micro_rows: int, student: Student
) -> list[ScoredBatch]:
    """The micro-batches of one step."""
    device = student.path.model.device
    parts = [indices[i : i + micro_rows] for i in range(0, len(indices), micro_rows)]
    return [
        ScoredBatch(
            collate([rollout[i] for i in part], student.chat.pad_id, device), join([scores[i] for i in part], device)
        )
        for part in parts
    ]


def _loss(
    path: StudentPath, kind: str, micro: ScoredBatch, predictability: float = 0.0
) -> tuple[torch.Tensor, dict[str, float]]:
    """Summed loss on the student path; to log, the teacher's and the student's mass on the teacher's top-k."""
    batch, scored = micro.batch, micro.scored
    loss, fields = ON_POLICY_LOSSES[kind]
    routing = student_routing(path, batch, predictability)
    output = path.hidden(batch.input_ids_BT, routing, use_cache=False)
    hidden_NH = output.last_hidden_state[batch.labels_BT != IGNORE]

    def with_mass(logits_NV: torch.Tensor, ids_NS: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        return torch.stack([loss(logits_NV, *targets), mass_on(logits_NV, ids_NS)])

    targets = [getattr(scored, name) for name in fields]
    value, student_mass = chunked(with_mass, hidden_NH, path.model.lm_head, scored.ids_CS, *targets).unbind()
    said = {"teacher_mass": float(scored.logp_CS.exp().sum()), "student_mass": float(student_mass.detach())}
    return weigh_predictability(path, routing, predictability, value, said)
