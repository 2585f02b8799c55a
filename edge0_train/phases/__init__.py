"""One function per phase: build, print the plan, loop, export. `PHASES` maps a phase's name to it."""

from edge0_train.phases.evaluate import evaluate
from edge0_train.phases.export import export
from edge0_train.phases.head_distill import head_distill
from edge0_train.phases.head_refine import head_refine
from edge0_train.phases.on_policy import on_policy
from edge0_train.phases.quantize import quantize
from edge0_train.phases.student_sft import student_sft
from edge0_train.phases.teacher_text import teacher_text

PHASES = {
    "quantize": quantize,
    "teacher_text": teacher_text,
    "head_distill": head_distill,
    "head_refine": head_refine,
    "student_sft": student_sft,
    "on_policy": on_policy,
    "evaluate": evaluate,
    "export": export,
}

__all__ = ["PHASES"]
