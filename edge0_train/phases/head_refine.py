"""phase=head_refine: the heads of head_distill, on the features that their own routing produces (docs/method.md 2.4).

    python -m edge0_train phase=head_refine tier=nano
    python -m edge0_train phase=head_refine tier=35b inputs.prerouter=runs/35b/head_distill

The heads' own predictions route, as in decoding, and the target is the true router on the hidden states that come of it. It
closes the "feature drift" that the paper leaves open. Recall is reported natively, as in head_distill, so that both compare.

Settings: inputs.prerouter (the heads to start from), text.rows, text.pack_length, optim.*, heads.loss.
Expected on nano, seed 0, 600 steps of 12 rows (50 s of one core): recall@4 .563 -> .574; without a LoRA KL to the teacher
.056 -> .042 and exact match .713 -> .757.
"""

from __future__ import annotations

from typing import Any

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.adapters import input_path, write_output
from edge0_train.build import build_student, check_text, sketch_student
from edge0_train.config import Config
from edge0_train.data.counts import Rows
from edge0_train.data.rows import text_of
from edge0_train.measure.head_report import train_heads
from edge0_train.objectives.heads import head_objective
from edge0_train.objectives.passes import student_pass
from edge0_train.plan import head_plan
from edge0_train.report import print_plan
from edge0_train.run import Run

FEATURES = "student"
"""Whose features the heads see, for the plan."""


def head_refine(config: Config, run: Run) -> dict[str, Any]:
    """Train the heads on, in one pass over the student's base without gradients through it; writes the prerouter file."""
    if config.dry_run:
        sketch = sketch_student(config, lora=False, heads=True)
        print_plan(config, head_plan(config, sketch, sketch.heads, Rows.planned(config), FEATURES))
        return {}
    data, dropped = text_of(config)
    student = build_student(config, prerouter=input_path(config, "prerouter"))
    check_text(config, student, data)
    heads = student.path.heads
    if heads is None:
        raise Edge0Error("inputs.prerouter: empty; refinement goes on from heads: name the file of phase=head_distill")
    objective = head_objective(config, student, heads, data.train, student_pass)
    print_plan(config, head_plan(config, student.path, heads, Rows.of_data(data, dropped), FEATURES))

    result, summary = train_heads(run, student, heads, objective, data)

    write_output(
        config,
        "prerouter",
        heads.tensors(),
        student.base,
        {**result, "held_out_recall": summary["recall"]["heads"]},
        data.source,
        {"prerouter": student.prerouter},
        teacher=data.teacher,
    )
    return {**result, **summary, "dropped": dropped}
