"""Every setting, declared once: type, default, bounds, choices, and the sentence that explains it.

`configs/train.yaml`, the page of all settings and the checks follow from here. Below the entry nothing is a DictConfig.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edge0_runtime.contract.tier import Tier
from edge0_train.config.phases import CHAIN, PHASE_NAMES
from edge0_train.config.setting import Setting, names_in, setting


@dataclass(frozen=True)
class Hardware:
    """What a plan is compared with: `hardware=NAME` sets it all and what fits there; 0 is what this machine has."""

    name: str = setting("A file of configs/hardware.", "", may_be_empty=True, volatile=True)
    processes: int = setting("Of one training on it, a device each.", 0, least=0, at_most=1024, volatile=True)
    device_gib: float = setting("Memory of a process's device.", 0.0, least=0, volatile=True)
    host_gib: float = setting("Memory of the host, for all processes.", 0.0, least=0, volatile=True)
    note: str = setting("Why a phase does not fit there, and what to do instead.", "", may_be_empty=True, volatile=True)


@dataclass(frozen=True)
class Base:
    """The int4 checkpoint in MLX's layout, and how its dequantisation is held (float32 arithmetic, rounded once to dtype)."""

    directory: str = setting("The int4 checkpoint: phase=quantize writes it.", "${root}/base")
    source: str = setting(
        "The transformers directory that phase=quantize makes it from.",
        "${teacher.directory}",
        may_be_empty=True,
    )
    names: str = setting(
        "Tensor names that phase=quantize writes: mlx-lm's, or the published ones, which the public runtime reads.",
        "mlx",
        choices=names_in("edge0_runtime.contract.family", "NAMES"),
    )
    dtype: str = setting(
        "What dequantised values are rounded to; take float32 on a CPU.", "bfloat16", choices=("float32", "bfloat16")
    )
    device: str = setting("Where torch computes: cuda, or cpu.", "cuda")
    storage: str = setting(
        "bf16 dequantises once and holds the values in `dtype`; packed holds int4 codes and dequantises in every pass.",
        "bf16",
        choices=("bf16", "packed"),
    )
    residency: str = setting(
        "Where the codes of a packed base lie until a pass needs them: on the device, in host memory, or in mapped files.",
        "device",
        choices=names_in("edge0_train.base.weights", "RESIDENCIES"),
    )
    gradient_checkpointing: bool = setting(
        "Phases that train the LoRA compute each layer again in backward: less memory, a third more time.", False
    )


@dataclass(frozen=True)
class Teacher:
    """The teacher: the original model, routed by its own gates at its published K."""

    directory: str = setting("Its transformers directory.", "", may_be_empty=True)
    resident: bool = setting(
        "on_policy keeps it beside the student; false loads it for each round's scores, with the student in host memory.",
        True,
        volatile=True,
    )


@dataclass(frozen=True)
class Text:
    """Where prompts come from, and the rows of text that phases train on."""

    prompts: str = setting(
        "tasks (generated; tasks:chain names some), a file, folder or glob of .jsonl, .json or .parquet, or a dataset.",
        "",
        may_be_empty=True,
    )
    split: str = setting("The split of a dataset that has several.", "train")
    column: str = setting(
        "The column with a text or a list of messages; empty: messages, conversations or prompt, whichever is there.",
        "",
        may_be_empty=True,
    )
    max_dropped: float = setting(
        "The run stops when a larger share of a source's rows cannot be used.", 0.1, least=0, at_most=1, volatile=True
    )
    rows: str = setting("Run directory of phase=teacher_text.", "${root}/teacher_text")
    max_length: int = setting(
        "Tokens of prompt + completion; longer rows are dropped and counted.", 4096, least=2, at_most=2**20
    )
    pack_length: int = setting(
        "Heads and student_sft train on lines of this many tokens that rows share; 0: one row a line.",
        0,
        least=0,
        at_most=2**20,
    )


@dataclass(frozen=True)
class Sample:
    """How many completions to generate, and how; and when generated rows are so bad that the run stops."""

    prompts: int = setting("Prompts that the teacher completes to train on.", 100000, least=1)
    eval_prompts: int = setting("Prompts held out, and rows that phase=evaluate measures on.", 512, least=1)
    batch: int = setting("Completions generated, or scored, at a time.", 64, least=1)
    max_new_tokens: int = setting("Where a completion is cut off.", 2048, least=1, at_most=2**20)
    temperature: float = setting("For the teacher's text and on_policy's rollouts; 0: greedy.", 1.0, least=0)
    top_p: float = setting(
        "The likeliest tokens of so much probability are drawn from; 1: all.", 1.0, above=0, at_most=1
    )
    backend: str = setting("What generates in phase=teacher_text.", "transformers", choices=("transformers", "vllm"))
    max_truncated: float = setting(
        "The run stops when a larger share of generated rows hits max_new_tokens.",
        0.9,
        least=0,
        at_most=1,
        volatile=True,
    )
    max_repetitive: float = setting(
        "The run stops when a larger share of generated rows repeats itself.", 0.5, least=0, at_most=1, volatile=True
    )
    max_growth: float = setting(
        "on_policy stops when a round's completions are longer on average than this multiple of the first round's.",
        3.0,
        least=1,
        volatile=True,
    )


@dataclass(frozen=True)
class Optim:
    """AdamW with a warm-up, then the schedule."""

    steps: int = setting("Optimizer steps; in on_policy, of all rounds together.", 1000, least=1)
    rows: int = setting("Rows of an optimizer step, over all ranks.", 32, least=1)
    micro_rows: int = setting("Rows of a micro-batch.", 8, least=1)
    lr: float = setting("Peak learning rate.", 1.0e-3, above=0)
    weight_decay: float = setting("Decoupled weight decay.", 0.0, least=0)
    warmup: int = setting("Steps in which the rate rises to its peak.", 20, least=0)
    schedule: str = setting(
        "The rate after the warm-up: constant, or a cosine down to a tenth.", "cosine", choices=("constant", "cosine")
    )
    clip: float = setting("Largest gradient norm; 0: off.", 1.0, least=0)
    patience: int = setting(
        "student_sft stops after so many evaluations without a better held-out loss, and keeps its best values; 0: never.",
        0,
        least=0,
    )


@dataclass(frozen=True)
class Heads:
    """How prerouter heads train."""

    loss: str = setting(
        "A head's loss against the next layer's router.", "kl", choices=names_in("edge0_train.losses", "HEAD_LOSSES")
    )
    joint_lr: float = setting(
        "student_sft trains the heads too, at this multiple of its rate; 0: frozen.", 0.3, least=0
    )
    predictability: float = setting(
        "student_sft, on_policy: weight of KL(router || head), which makes routing predictable; 0: off.", 0.0, least=0
    )
    change_penalty: float = setting(
        "student_sft: weight of what the heads want beyond the experts that ran a moment ago, so that fewer are read; 0: off.",
        0.0,
        least=0,
    )


@dataclass(frozen=True)
class OnPolicy:
    """Phase 3: rounds of rollout -> score -> train."""

    rounds: int = setting("How many; optim.steps must be a multiple of it.", 4, least=1)
    loss: str = setting(
        "reverse_kl; the others are controls.",
        "reverse_kl",
        choices=names_in("edge0_train.losses", "ON_POLICY_LOSSES"),
    )
    top_k: int = setting(
        "The teacher's tokens that the divergence tells apart; the vocabulary's size makes it exact.", 64, least=1
    )


@dataclass(frozen=True)
class Inputs:
    """Adapters that a phase starts from: auto (the newest that the phases before wrote), a file, a run directory, or empty."""

    prerouter: str = setting("The heads to start from.", "auto", may_be_empty=True)
    lora: str = setting("The LoRA to start from.", "auto", may_be_empty=True)


@dataclass(frozen=True)
class Export:
    """The model directory, and the reference traces that go with it."""

    directory: str = setting("The model directory that the runtime serves.", "${root}/model")
    trace_prompts: int = setting("Held-out prompts that the reference traces continue.", 8, least=1)
    trace_tokens: int = setting("Tokens of each continuation.", 128, least=1, at_most=2**20)
    trace_top: int = setting("Logits kept at every token.", 16, least=1)


@dataclass(frozen=True)
class Logger:
    """metrics.jsonl is always written."""

    wandb: str = setting(
        "Weights & Biases; without the package, only metrics.jsonl is written.",
        "offline",
        choices=("offline", "online", "disabled"),
        volatile=True,
    )
    project: str = setting("Name of the W&B project.", "edge0", volatile=True)
    every: int = setting("Optimizer steps between metric rows.", 10, least=1, volatile=True)
    checkpoint_every: int = setting("Optimizer steps between checkpoints.", 100, least=1, volatile=True)


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run of one phase."""

    phase: str
    chain: tuple[str, ...] = setting(
        "The phases of phase=all, in order; `inputs.*: auto` looks for adapters along it.", CHAIN, choices=PHASE_NAMES
    )
    seed: int = setting("The seed of everything random.", 0, least=0, at_most=2**32 - 1)
    threads: int = setting("torch's CPU threads.", 2, least=1, at_most=1024, volatile=True)
    root: str = setting("Every phase of one training lives below this directory.", "runs/${tier.name}")
    run_dir: str = setting("This run's own directory.", "${root}/${phase}")
    resume: bool = setting(
        "Continue a run directory that exists; otherwise an existing one is an error.", False, volatile=True
    )
    dry_run: bool = setting("Print the plan and stop.", False, volatile=True)
    tier: Tier
    hardware: Hardware
    base: Base
    teacher: Teacher
    text: Text
    sample: Sample
    optim: Optim
    heads: Heads
    on_policy: OnPolicy
    inputs: Inputs
    export: Export
    logger: Logger


@functools.cache
def groups() -> Mapping[str, type[Any]]:
    """{name: dataclass} of the groups of settings, in the order of `Config`; the tier is no setting."""
    hints = typing.get_type_hints(Config)
    kinds = {name: hint for name, hint in hints.items() if isinstance(hint, type) and hint is not Tier}
    return {name: hint for name, hint in kinds.items() if dataclasses.is_dataclass(hint)}


def settings_of(cls: type[Any]) -> Iterator[tuple[str, Setting]]:
    """(name, declaration) of a dataclass's own settings."""
    for field in dataclasses.fields(cls):
        if "setting" in field.metadata:
            yield field.name, field.metadata["setting"]


@functools.cache
def all_settings() -> Mapping[str, Setting]:
    """{name as on the command line: declaration}."""
    found = dict(settings_of(Config))
    return found | {f"{group}.{name}": one for group, cls in groups().items() for name, one in settings_of(cls)}


def value_of(config: Config, name: str) -> Any:
    """The value of a setting, by its name on the command line."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def nearest_setting(name: str) -> str:
    """The setting that somebody who wrote `name` most likely meant: by spelling, and by the words of its sentence."""

    def likeness(known: str) -> float:
        pairs = ((name, known), (name.rpartition(".")[2], known.rpartition(".")[2]))
        spelling = max(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)
        words = name.rpartition(".")[2].lower().split("_")
        told = re.findall("[a-z]+", all_settings()[known].sentence.lower())
        return spelling + max(spelling > 0.8, sum(word in told for word in words) / len(words))

    return max(all_settings(), key=likeness)
