"""What a prerouter head is, as data: the inputs it sees, and its tensors (docs/method.md 1.3).

A kind is declared here and computed twice, in `edge0_train/student/heads.py` and in `edge0_runtime/heads.py`; shapes, files and
what people are told follow from here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

TOKEN_NORM_EPS = 1e-6
"""In the input `token`."""
Shape = tuple[int, int]


@dataclass(frozen=True)
class HeadInput:
    """One input of a head that predicts layer N + 1's routing of a token; N owns the head.

    Attributes:
        width: which of the model's numbers its width is.
        of: which token it is about: the one being routed, or the one before it. An owner's inputs of the token before are known
            when that one's forward pass is through; what is of the token itself must be known before it runs.
    """

    width: Literal["hidden_size", "num_experts"]
    of: Literal["before", "token"]


HEAD_INPUTS = {
    "hidden": HeadInput("hidden_size", "before"),
    "routing": HeadInput("num_experts", "before"),
    "previous": HeadInput("num_experts", "before"),
    "token": HeadInput("hidden_size", "token"),
}
"""By name:
    hidden    layer N's MoE input.
    routing   multi-hot of the experts that layer N chose (`Tier.feature_topk`).
    previous  that of one token earlier.
    token     the token's own embedding: for token id v and the base's embedding row e = embed(v) (the values that the base
              itself embeds with, dequantised), e / sqrt(mean(e^2) + TOKEN_NORM_EPS) in float32, without a learned weight. The
              token has been sampled before the heads must run.
"""


@dataclass(frozen=True)
class HeadKind:
    """One kind of head.

    Attributes:
        inputs: names of what it sees of the token before, in the order of its input; `token`, where it is seen, comes after them.
        tensors: (width of the input F, `Tier.head_width` W, experts E) -> {part: [out, in]}, in the order of initialisation.
        direct: the part [E, F] that maps the input straight to logits. adding: the parts whose outputs are added to them.
        upstream_inputs: what a head of this kind sees in the public project; () if it has no such kind.
    """

    inputs: tuple[str, ...]
    tensors: Callable[[int, int, int], dict[str, Shape]]
    direct: str
    adding: tuple[str, ...]
    upstream_inputs: tuple[str, ...] = ()


HEAD_KINDS = {
    # The paper's: logits = fc2(gelu(fc1(x))) + linear_init(x), no biases.
    "mlp": HeadKind(
        inputs=("hidden", "routing", "previous"),
        tensors=lambda inputs, width, experts: {
            "fc1": (width, inputs),
            "fc2": (experts, width),
            "linear_init": (experts, inputs),
        },
        direct="linear_init",
        adding=("fc2",),
        upstream_inputs=("hidden", "routing", "previous"),
    ),
}


def inputs_of(kind: str, *, token_aware: bool) -> tuple[str, ...]:
    """Names of a head's inputs, in order."""
    return (*HEAD_KINDS[kind].inputs, *("token",) * token_aware)


def columns(inputs: tuple[str, ...], hidden_size: int, num_experts: int) -> dict[str, slice]:
    """{input: its columns in a head's input}, for a model of these numbers."""
    numbers = {"hidden_size": hidden_size, "num_experts": num_experts}
    ends = list(accumulate(numbers[HEAD_INPUTS[name].width] for name in inputs))
    return {name: slice(start, end) for name, start, end in zip(inputs, [0, *ends], ends, strict=False)}


def upstream_head_problems(kind: str, inputs: tuple[str, ...]) -> list[str]:
    """Why the public project's runtime would not compute such heads; [] if it would."""
    known = HEAD_KINDS[kind].upstream_inputs
    if not known:
        kinds = [name for name, one in HEAD_KINDS.items() if one.upstream_inputs]
        return [f"head is {kind}; it has heads of kind {', '.join(kinds)} alone"]
    return [
        "token_aware is True: the heads also see the token being routed; its heads do not"
        for name in inputs
        if name not in known
    ]
