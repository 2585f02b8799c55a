"""phase=on_policy: the student writes, the teacher scores, the LoRA trains with reverse KL (docs/method.md 2.3).

    python -m edge0_train phase=on_policy tier=nano
    python -m edge0_train phase=on_policy tier=35b on_policy.loss=forward_kl    # a control, see losses.ON_POLICY_LOSSES

Rounds of rollout -> score -> train. Every stage of a round is on disk (`round-000/`), so that student and teacher need not be
in memory together and a stopped run continues with the very rollouts it had.

Settings: inputs.prerouter and inputs.lora, text.prompts, sample.*, optim.*, on_policy.* (rounds, loss, top_k), teacher.resident,
heads.predictability.
Expected on nano, seed 0, 4 rounds of 6 steps of 64 rows (49 s of one core): KL to the teacher .0040 -> .0037, exact match
.992 -> .988: it does not lose what SFT has brought.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from accelerate import PartialState

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.provenance import DataSource
from edge0_train.adapters import describe_inputs, hash_files, input_path, write_output
from edge0_train.build import build_student, sketch_student
from edge0_train.config import Config
from edge0_train.data.complete import PathWriter
from edge0_train.data.counts import Rows
from edge0_train.data.health import RowHealth, check_rows
from edge0_train.data.prompts import Prompts
from edge0_train.data.rows import TextRow, read_rows
from edge0_train.data.writing import SAMPLES, describe_prompts, prompts_of, write_shards
from edge0_train.loop import train
from edge0_train.objectives.on_policy import on_policy_objective
from edge0_train.objectives.scoring import Scored, Scorer, score
from edge0_train.objectives.student import describe_predictability, lora_parameters
from edge0_train.plan import training_plan
from edge0_train.report import print_plan
from edge0_train.run import Run
from edge0_train.student import StudentPath, lora_tensors
from edge0_train.teacher import check_teacher, identify_teacher


def on_policy(config: Config, run: Run) -> dict[str, Any]:
    """Train the LoRA on its own completions; base and heads stay frozen."""
    rounds, optim = config.on_policy.rounds, config.optim
    steps, rows = optim.steps // rounds, optim.rows * optim.steps // rounds
    teacher = check_teacher(config)
    prompts = _prompts(config, rounds, rows)
    facts = {"teacher": teacher, "prompts": describe_prompts(prompts)}
    if config.dry_run:
        print_plan(config, facts | _plan(config, sketch_student(config, lora=True, heads=True)))
        return {}
    prerouter, lora = input_path(config, "prerouter"), input_path(config, "lora")
    if not prerouter or not lora:
        raise Edge0Error("inputs: on_policy starts from heads and a LoRA; set inputs.prerouter and inputs.lora")
    student = build_student(config, prerouter=prerouter, lora=lora)
    chat = student.chat
    print_plan(config, facts | _plan(config, student.path))
    writer = PathWriter(student.path, config.sample, chat.end_ids, chat.pad_id, native_k=None)
    scorer = Scorer(config, student)

    @functools.lru_cache(maxsize=1)
    def prepared(number: int) -> tuple[list[TextRow], list[Scored]]:
        """The round's completions by the student as it is now, scored; what is on disk is taken as it is."""
        directory, mine = _round(run, number), prompts.train[number * rows : (number + 1) * rows]
        rollout = write_shards(config, directory, writer, chat, mine, f"rollout-{number}")
        first = RowHealth.of(_stored(run, 0)) if number else None
        check_rows(rollout, config.sample, f"student, round {number}", before=first)
        return rollout, score(config, directory, scorer, chat.pad_id, rollout)

    @functools.lru_cache(maxsize=1)
    def about(number: int) -> dict[str, float]:
        return {f"rollout_{name}": value for name, value in RowHealth.of(_stored(run, number)).to_dict().items()}

    objective = on_policy_objective(config, student, prepared, evaluate=lambda done: about((done - 1) // steps))
    result = train(run, config.optim, objective)
    if PartialState().is_main_process:
        run.write_samples([chat.shown(row) for row in _stored(run, rounds - 1)[:SAMPLES]])

    write_output(
        config,
        "lora",
        lora_tensors(student.path.model, config.tier),
        student.base,
        result,
        DataSource(hash_files(sorted(run.directory.glob("round-*/rollout-*.jsonl"))), rows * rounds),
        {"prerouter": student.prerouter, "lora": student.lora},
        prerouter_sha256=student.prerouter.sha256 if student.prerouter else None,
        teacher=identify_teacher(config.teacher.directory) if PartialState().is_main_process else None,
    )
    health = [RowHealth.of(_stored(run, n)).to_dict() for n in range(rounds)]
    return {**result, "rounds": health, **prompts.to_dict()}


def _prompts(config: Config, rounds: int, rows: int) -> Prompts:
    """One prompt for every completion of all rounds. Raises Edge0Error when the source has fewer."""
    prompts = prompts_of(config, config.base.directory, train=rows * rounds, held_out=1, seed=config.seed + 1)
    if len(prompts.train) < rows * rounds:
        raise Edge0Error(
            f"text.prompts: {len(prompts.train)} prompts (dropped: {prompts.dropped or 'none'}), but {rounds} rounds of {rows}"
            f" rows need {rows * rounds}; lower optim.steps or optim.rows"
        )
    return prompts


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
        **training_plan(config, path, lora_parameters(path), rows),
    }


def _round(run: Run, number: int) -> Path:
    directory = run.directory / f"round-{number:03d}"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _stored(run: Run, number: int) -> list[TextRow]:
    """The rollout of a round that is on disk."""
    return [row for file in sorted(_round(run, number).glob("rollout-*.jsonl")) for row in read_rows(file)]
