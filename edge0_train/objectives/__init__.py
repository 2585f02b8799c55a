"""What phases hand to the loop: plain functions that return its `Objective`. Recipes import the same ones.

passes.py (windows of text rows, how a batch is routed, the loss at its labels), heads.py (head distillation), student.py (the
student path, with the routing's predictability), on_policy.py (rollouts that the teacher has scored), scoring.py (those scores).
"""

from edge0_train.objectives.heads import HeadBatch, head_objective
from edge0_train.objectives.on_policy import ScoredBatch, on_policy_objective
from edge0_train.objectives.passes import completion_loss, hidden_at_labels, mean_loss, native_pass, student_pass
from edge0_train.objectives.student import joint_parameters, lora_parameters, student_objective

__all__ = [
    "HeadBatch",
    "ScoredBatch",
    "completion_loss",
    "head_objective",
    "hidden_at_labels",
    "joint_parameters",
    "lora_parameters",
    "mean_loss",
    "native_pass",
    "on_policy_objective",
    "student_objective",
    "student_pass",
]
