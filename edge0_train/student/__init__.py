"""The student: frozen base + prerouter heads + recovery LoRA, under the tier's routing timeline.

One `StudentPath` serves every phase, the rollouts and the evaluation. Shape letters used in this package:
B rows, T tokens, N flat tokens (B x T), H hidden size, E experts, K served experts per token, F head input width.
"""

from edge0_train.student.generate import Completion, Decoding, generate
from edge0_train.student.heads import PrerouterHeads
from edge0_train.student.lora import add_lora, load_lora, lora_disabled, lora_tensors
from edge0_train.student.path import RoutingPass, StudentPath

__all__ = [
    "Completion",
    "Decoding",
    "PrerouterHeads",
    "RoutingPass",
    "StudentPath",
    "add_lora",
    "generate",
    "load_lora",
    "lora_disabled",
    "lora_tensors",
]
