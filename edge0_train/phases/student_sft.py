"""phase=student_sft: the recovery LoRA on teacher text with prerouting on, completion-only cross-entropy (docs/method.md 2.2).

    python -m edge0_train phase=student_sft tier=nano
    python -m edge0_train phase=student_sft tier=35b heads.joint_lr=0 base.storage=packed base.gradient_checkpointing=true

Settings: inputs.prerouter, inputs.lora (empty: a new one), text.rows, text.pack_length, optim.* (optim.patience stops early),
heads.joint_lr (the heads train along; 0: frozen), heads.predictability, heads.change_penalty.
Expected on nano, seed 0, 360 steps of 32 rows (159 s of one core): KL to the teacher .042 -> .0040, exact match .757 -> .992,
recall@4 .574 -> .557.
"""

from __future__ import annotations

from typing import Any

from accelerate import PartialState

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.adapters import input_path, write_output
from edge0_train.build import build_student, check_text, sketch_student
from edge0_train.config import Config
from edge0_train.data.counts import Rows
from edge0_train.data.rows import text_of
from edge0_train.data.writing import SAMPLES
from edge0_train.loop import train
from edge0_train.measure.samples import greedy_samples
from edge0_train.objectives.passes import held_out_batches
from edge0_train.objectives.student import (
    describe_changes,
    describe_predictability,
    joint_parameters,
    lora_parameters,
    student_objective,
)
from edge0_train.plan import training_plan
from edge0_train.report import print_plan
from edge0_train.run import Run
from edge0_train.student import StudentPath, lora_tensors


def student_sft(config: Config, run: Run) -> dict[str, Any]:
    """Train the LoRA on the student path, and with `heads.joint_lr` the heads too; the base stays frozen.

    A head's gradient comes through the mixing weights of the experts that it chose. With `optim.patience`, what is exported are
    the values of the best held-out loss, not the last ones.
    """
    if config.dry_run:
        sketch = sketch_student(config, lora=True, heads=True)
        print_plan(config, _plan(config, sketch, Rows.planned(config)))
        return {}
    data, dropped = text_of(config)
    student = build_student(
        config, prerouter=input_path(config, "prerouter"), lora=input_path(config, "lora"), new_lora=True
    )
    check_text(config, student, data)
    heads, prerouter = student.path.heads, student.prerouter
    if heads is None or prerouter is None:
        raise Edge0Error("inputs.prerouter: empty; the student path needs heads: name the file of phase=head_distill")
    held_out = held_out_batches(config, student, data.held_out)
    objective = student_objective(config, student, data.train, held_out)
    print_plan(config, _plan(config, student.path, Rows.of_data(data, dropped)))

    result = train(run, config.optim, objective)
    if PartialState().is_main_process:
        run.write_samples(greedy_samples(config, student, data.held_out[:SAMPLES]))

    parents = {"prerouter": prerouter, "lora": student.lora}
    served_with = prerouter.sha256
    if config.heads.joint_lr:
        served_with = write_output(
            config, "prerouter", heads.tensors(), student.base, result, data.source, parents, teacher=data.teacher
        )
    write_output(
        config,
        "lora",
        lora_tensors(student.path.model, config.tier),
        student.base,
        result,
        data.source,
        parents,
        prerouter_sha256=served_with,
        teacher=data.teacher,
    )
    return {**result, "dropped": dropped}


def _plan(config: Config, path: StudentPath, rows: Rows) -> dict[str, str]:
    """The phase's plan; `path` may be on the meta device."""
    trainable = lora_parameters(path) | joint_parameters(config, path.heads)
    joint = config.heads.joint_lr
    facts = training_plan(config, path, trainable, rows)
    return facts | {
        "heads": (f"trained at {joint} of the rate" if joint else "frozen")
        + describe_predictability(config)
        + describe_changes(config)
    }
