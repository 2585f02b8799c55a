"""phase=head_distill: prerouter heads against the next layer's true router, one token ahead (docs/method.md 2.1).

    python -m edge0_train phase=head_distill tier=nano
    python -m edge0_train phase=head_distill tier=35b heads.loss=kl_margin optim.lr=5e-4

The base runs natively, at the served K: heads learn from the features of a model that routes correctly. They start as the next
layer's router applied to this layer's hidden state, and must end better than every trivial baseline.

Settings: text.rows (phase=teacher_text's directory), text.pack_length, optim.*, heads.loss. No adapter goes in.
Expected on nano, seed 0, 600 steps of 12 rows (46 s of one core): held-out recall@4 .156 -> .563; without a LoRA the student that
these heads route has KL .056 to the teacher and exact match .713.
"""

from __future__ import annotations

from typing import Any

import torch

from edge0_train.adapters import write_output
from edge0_train.build import build_student, check_text, sketch_student, warm_heads
from edge0_train.config import Config
from edge0_train.data.counts import Rows
from edge0_train.data.rows import text_of
from edge0_train.measure.head_report import train_heads
from edge0_train.objectives.heads import head_objective
from edge0_train.objectives.passes import native_pass
from edge0_train.plan import head_plan
from edge0_train.report import print_plan
from edge0_train.run import Run

FEATURES = "base"
"""Whose features the heads see, for the plan."""


def head_distill(config: Config, run: Run) -> dict[str, Any]:
    """Train all heads in one pass over the base, without gradients through it; writes the prerouter file."""
    if config.dry_run:
        sketch = sketch_student(config, lora=False, heads=True)
        print_plan(config, head_plan(config, sketch, sketch.heads, Rows.planned(config), FEATURES))
        return {}
    data, dropped = text_of(config)
    student = build_student(config)
    check_text(config, student, data)
    torch.manual_seed(config.seed)
    heads = warm_heads(student.path)
    objective = head_objective(config, student, heads, data.train, native_pass)
    print_plan(config, head_plan(config, student.path, heads, Rows.of_data(data, dropped), FEATURES))

    result, summary = train_heads(run, student, heads, objective, data)

    write_output(
        config,
        "prerouter",
        heads.tensors(),
        student.base,
        {**result, "held_out_recall": summary["recall"]["heads"]},
        data.source,
        parents={},
        teacher=data.teacher,
    )
    return {**result, **summary, "dropped": dropped}
