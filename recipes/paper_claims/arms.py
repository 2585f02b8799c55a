"""What is trained (`NODES`) and what is compared (`ARMS`), on the nano tier; two phases in an order that the package lacks.

A node is one training run in a directory of its own; it starts from other nodes' adapters, so nodes are shared between arms.
An arm is one row of the table: adapters of nodes under a routing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from edge0_train.adapters import write_output
from edge0_train.build import build_student, warm_heads
from edge0_train.config import Config
from edge0_train.data.rows import text_of
from edge0_train.loop import train
from edge0_train.objectives.heads import head_objective
from edge0_train.objectives.passes import native_pass
from edge0_train.objectives.student import student_objective
from edge0_train.run import Run
from edge0_train.student import lora_tensors

Phase = Callable[[Config, Run], dict[str, Any]]


@dataclass(frozen=True)
class Budget:
    """How much every run trains, and on how many held-out rows arms are compared."""

    text_rows: int
    head_steps: int
    sft_steps: int
    policy_steps: int
    policy_rounds: int
    rows: int


FULL = Budget(text_rows=4096, head_steps=600, sft_steps=120, policy_steps=24, policy_rounds=4, rows=256)
QUICK = Budget(text_rows=1280, head_steps=200, sft_steps=40, policy_steps=6, policy_rounds=2, rows=128)


@dataclass(frozen=True)
class Node:
    """One training run.

    Attributes:
        phase: of the package. function: run instead of the phase, under its settings.
        heads, lora: nodes whose adapters it starts from. overrides: further settings.
    """

    phase: str
    heads: str = ""
    lora: str = ""
    overrides: tuple[str, ...] = ()
    function: Phase | None = None


@dataclass(frozen=True)
class Arm:
    """One row of the table.

    Attributes:
        what: in words. heads, lora: nodes whose adapters run; empty: none. native_k: own gates with that K instead of heads.
        teacher, k, merged: see `edge0_train.measure.bench.Stage`. extras: further measurements: survival, drift, overlap.
    """

    what: str
    heads: str = ""
    lora: str = ""
    native_k: int | None = None
    teacher: bool = False
    k: int | None = None
    merged: bool = False
    extras: tuple[str, ...] = ()


# -- runs that no phase of the package does ----------------------------------------------------------------------------


def untrained(config: Config, run: Run) -> dict[str, Any]:
    """The warm-started heads as a prerouter file.

    Their last layer, zero at the start, gets values that change no logit by more than about 1e-3: a file with a tensor of zeros
    is refused, because it usually means that something was not trained.
    """
    student = build_student(config)
    torch.manual_seed(config.seed)
    heads = warm_heads(student.path)
    with torch.no_grad():
        for head in heads.layers.values():
            head.fc2.weight.normal_(std=1e-4)  # type: ignore[union-attr,operator]
    data, _ = text_of(config)
    nothing = {"steps": 0, "tokens": 0}
    write_output(config, "prerouter", heads.tensors(), student.base, nothing, data.source, {}, teacher=data.teacher)
    return nothing


def native_sft(config: Config, run: Run) -> dict[str, Any]:
    """student_sft with every layer on its own gate at the served K: the LoRA never sees a prediction."""
    data, _ = text_of(config)
    student = build_student(config, new_lora=True)
    result = train(run, config.optim, student_objective(config, student, data.train, routing=native_pass))
    lora = lora_tensors(student.path.model, config.tier)
    write_output(config, "lora", lora, student.base, result, data.source, {}, teacher=data.teacher)
    return result


def heads_after_lora(config: Config, run: Run) -> dict[str, Any]:
    """head_distill on base and LoRA (inputs.lora), natively routed: heads come last."""
    data, _ = text_of(config)
    student = build_student(config, lora=config.inputs.lora)
    student.path.model.requires_grad_(False)
    torch.manual_seed(config.seed)
    heads = warm_heads(student.path)
    result = train(run, config.optim, head_objective(config, student, heads, data.train, native_pass))
    parents = {"lora": student.lora}
    write_output(config, "prerouter", heads.tensors(), student.base, result, data.source, parents, teacher=data.teacher)
    return result


# -- the plan ----------------------------------------------------------------------------------------------------------

FROZEN = ("heads.joint_lr=0",)
JOINT = ("heads.joint_lr=0.3",)
COLLAPSED = ("sample.max_truncated=1", "sample.max_repetitive=1", "sample.max_growth=1000")
"""For runs that are here to show a collapse: without these the gates stop them."""


PREDICTABLE = {"weak": 0.01, "strong": 0.1}
"""Weights of heads.predictability; at the first the routing's divergence weighs about as much as the cross-entropy."""


@functools.cache
def nodes(budget: Budget) -> dict[str, Node]:
    """{name: run}, an order in which every node comes after those that it starts from."""
    heads, sft = f"optim.steps={budget.head_steps}", f"optim.steps={budget.sft_steps}"
    policy = (f"optim.steps={budget.policy_steps}", f"on_policy.rounds={budget.policy_rounds}")
    distill = Node("head_distill", overrides=(heads,))
    frozen = Node("student_sft", "heads", overrides=(sft, *FROZEN))
    on_policy = Node("on_policy", "heads", "paper_sft", policy)
    made = {
        "teacher_text": Node(
            "teacher_text", overrides=(f"sample.prompts={budget.text_rows}", f"sample.eval_prompts={budget.rows}")
        ),
        "untrained": replace(distill, function=untrained),
        "heads": distill,
        "paper_sft": frozen,
        "paper": on_policy,
        "refined": Node("head_refine", "heads", overrides=(heads,)),
        "ours_sft": Node("student_sft", "refined", overrides=(sft, *JOINT)),
        "ours": Node("on_policy", "ours_sft", "ours_sft", policy),
        "untrained_sft": replace(frozen, heads="untrained"),
        "untrained_joint": replace(frozen, heads="untrained", overrides=(sft, *JOINT)),
        # One step at a rate of nearly nothing: the phase wants a LoRA, and a LoRA of zeros is refused as untrained.
        "no_sft": replace(frozen, overrides=("optim.steps=1", "optim.warmup=0", "optim.lr=1e-5", *FROZEN)),
        "no_sft_policy": replace(on_policy, lora="no_sft", overrides=(*policy, *COLLAPSED)),
        "native_lora": replace(frozen, heads="", function=native_sft),
        "heads_last": replace(distill, lora="native_lora", function=heads_after_lora),
        # As many completions as phase 3 trains on, in steps of half as many rows.
        "more_sft": replace(frozen, lora="paper_sft", overrides=(f"optim.steps={2 * budget.policy_steps}", *FROZEN)),
    }
    for name, weight in PREDICTABLE.items():
        made[f"predictable_{name}"] = replace(
            made["ours_sft"], overrides=(sft, *JOINT, f"heads.predictability={weight}")
        )
    made["predictable_frozen"] = replace(
        frozen, overrides=(sft, *FROZEN, f"heads.predictability={PREDICTABLE['weak']}")
    )
    for loss in ("bce", "kl_margin"):
        made[f"heads_{loss}"] = replace(distill, overrides=(heads, f"heads.loss={loss}"))
    for name, parent in (("kl_sft", "heads"), ("bce_sft", "heads_bce")):
        made[name] = replace(made["ours_sft"], heads=parent)
    for loss in ("forward_kl", "reverse_kl_no_tail", "sampled_token"):
        made[loss] = replace(on_policy, overrides=(*policy, f"on_policy.loss={loss}"))
    # The teacher's top 32 of 384 hold .9999 of its mass: only with few tokens is there a tail to speak of.
    for name, loss in (("top2", "reverse_kl"), ("top2_no_tail", "reverse_kl_no_tail")):
        made[name] = replace(on_policy, overrides=(*policy, "on_policy.top_k=2", f"on_policy.loss={loss}"))
    for k in (2, 8):
        made[f"heads_k{k}"] = replace(distill, overrides=(heads, f"tier.k={k}"))
        made[f"sft_k{k}"] = replace(frozen, heads=f"heads_k{k}", overrides=(sft, f"tier.k={k}", *FROZEN))
    return made


ARMS: dict[str, Arm] = {
    # The most informative first: an interrupted run has these.
    "teacher": Arm("teacher, K=8", native_k=8, teacher=True, extras=("overlap",)),
    "int4_k8": Arm("int4 base, own gates, K=8", native_k=8),
    "int4_k4": Arm("int4 base, own gates, K=4", native_k=4, extras=("overlap",)),
    "int4_k2": Arm("int4 base, own gates, K=2", native_k=2),
    "untrained": Arm("untrained heads, no LoRA", "untrained"),
    "heads": Arm("heads without LoRA", "heads", extras=("drift",)),
    "paper_sft": Arm("paper: heads, SFT", "heads", "paper_sft", extras=("drift",)),
    "paper": Arm("paper: heads, SFT, on-policy", "heads", "paper", extras=("drift", "survival")),
    "paper_merged": Arm("paper, LoRA merged and requantised", "heads", "paper", merged=True),
    "refined": Arm("refined heads without LoRA", "refined", extras=("drift",)),
    "ours_sft": Arm("ours: refined heads, joint SFT", "ours_sft", "ours_sft", extras=("drift",)),
    "ours": Arm("ours: refined heads, joint SFT, on-policy", "ours_sft", "ours", extras=("drift", "survival")),
    "untrained_sft": Arm("SFT over untrained heads (frozen)", "untrained", "untrained_sft"),
    "no_sft_policy": Arm("on-policy without SFT", "heads", "no_sft_policy"),
    "native_lora": Arm("LoRA on native routing, then base's heads", "heads", "native_lora"),
    "heads_last": Arm("LoRA on native routing, then its heads", "heads_last", "native_lora"),
    "k2_reused": Arm("K=4's heads and SFT served at K=2", "heads", "paper_sft", k=2),
    "k2_trained": Arm("heads and SFT trained for K=2", "heads_k2", "sft_k2", k=2),
    "forward_kl": Arm("on-policy with forward KL", "heads", "forward_kl"),
    "reverse_kl_no_tail": Arm("on-policy without the tail", "heads", "reverse_kl_no_tail"),
    "sampled_token": Arm("on-policy on the sampled token", "heads", "sampled_token"),
    "more_sft": Arm("more SFT instead of on-policy", "heads", "more_sft"),
    "untrained_joint": Arm("SFT trains LoRA and untrained heads", "untrained_joint", "untrained_joint"),
    "k8_reused": Arm("K=4's heads and SFT served at K=8", "heads", "paper_sft", k=8),
    "k8_trained": Arm("heads and SFT trained for K=8", "heads_k8", "sft_k8", k=8),
    "top2": Arm("on-policy with the teacher's top 2", "heads", "top2"),
    "top2_no_tail": Arm("on-policy with the top 2, no tail", "heads", "top2_no_tail"),
    "heads_bce": Arm("heads by BCE, without LoRA", "heads_bce", extras=("drift",)),
    "heads_kl_margin": Arm("heads by KL + margin, without LoRA", "heads_kl_margin", extras=("drift",)),
    "kl_sft": Arm("heads by KL, joint SFT", "kl_sft", "kl_sft", extras=("drift",)),
    "bce_sft": Arm("heads by BCE, joint SFT", "bce_sft", "bce_sft", extras=("drift",)),
    "predictable_weak": Arm("ours, SFT, predictability .01", "predictable_weak", "predictable_weak", extras=("drift",)),
    "predictable_strong": Arm(
        "ours, SFT, predictability .1", "predictable_strong", "predictable_strong", extras=("drift",)
    ),
    "predictable_frozen": Arm("paper, SFT, predictability .01", "heads", "predictable_frozen", extras=("drift",)),
    "ours_merged": Arm("ours, LoRA merged and requantised", "ours_sft", "ours", merged=True),
}


def needed(arm: Arm, budget: Budget) -> list[str]:
    """Names of all nodes that an arm rests on, in an order in which they can run."""
    known = nodes(budget)
    wanted: set[str] = {"teacher_text"}
    open_names = [name for name in (arm.heads, arm.lora) if name]
    while open_names:
        name = open_names.pop()
        if name not in wanted:
            wanted.add(name)
            open_names += [parent for parent in (known[name].heads, known[name].lora) if parent]
    return [name for name in known if name in wanted]
