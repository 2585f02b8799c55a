"""Configuration: Hydra composes it, this module turns it into frozen dataclasses once; below the entry nothing is a DictConfig.

`configs/train.yaml` is the map of all fields. A field that is missing, unknown or of the wrong type is one sentence that
names it.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.fields import check_fields
from edge0_runtime.contract.tier import Tier
from edge0_train.base.weights import RESIDENCIES

PHASE_NAMES = (
    "quantize",
    "teacher_text",
    "head_distill",
    "head_refine",
    "student_sft",
    "on_policy",
    "evaluate",
    "export",
)
ON_POLICY_LOSSES = ("reverse_kl", "forward_kl", "reverse_kl_no_tail", "sampled_token")


@dataclass(frozen=True)
class Base:
    """The int4 checkpoint in MLX's layout, and how its dequantisation is held (f32 arithmetic, rounded once to dtype).

    storage: bf16 (all values, in `dtype`) or packed (int4 codes; a module that runs has the same values).
    residency: where the codes of a packed base lie: device, host (memory) or disk (mapped files).
    gradient_checkpointing: phases that train the LoRA keep one tensor a layer and compute the rest again in backward.
    """

    directory: str
    source: str
    dtype: str
    device: str
    storage: str
    residency: str
    gradient_checkpointing: bool


@dataclass(frozen=True)
class Teacher:
    """The teacher: a transformers directory; it routes by its own gates at its published K.

    resident: on_policy keeps it beside the student. Else it is loaded for each round's scores, with the student in host memory.
    """

    directory: str
    resident: bool


@dataclass(frozen=True)
class Text:
    """Text rows: where prompts come from, and where teacher text lies (a `teacher_text` run directory).

    max_length: of prompt + completion; longer rows are dropped. pack_length: rows share lines of that many tokens; 0: off.
    prompts: `tasks` (the generated nano tasks; `tasks:chain` names some), or a JSONL/Parquet file, or a datasets name, with a
        `messages` column.
    """

    prompts: str
    rows: str
    max_length: int
    pack_length: int


@dataclass(frozen=True)
class Sample:
    """How many completions to generate, and how; and when generated rows are so bad that the run stops.

    backend: transformers or vllm (teacher_text only). max_truncated, max_repetitive: shares of rows. max_growth: mean length
    against that of the rows before it (on-policy rounds).
    """

    prompts: int
    eval_prompts: int
    batch: int
    max_new_tokens: int
    temperature: float
    top_p: float
    backend: str
    max_truncated: float
    max_repetitive: float
    max_growth: float


@dataclass(frozen=True)
class Optim:
    """AdamW; `rows` per optimizer step, in micro-batches of `micro_rows`; warm-up then the schedule.

    patience: student_sft stops after that many evaluations without a better held-out loss, and keeps its best values; 0: off.
    """

    steps: int
    rows: int
    micro_rows: int
    lr: float
    weight_decay: float
    warmup: int
    schedule: str
    clip: float
    patience: int


@dataclass(frozen=True)
class Heads:
    """How heads train.

    Attributes:
        loss: kl, bce or kl_margin (losses.py).
        features: base (native routing, phase 1) or student (the heads' own decode-time features, refinement).
        joint_lr: student_sft trains the heads too, at this multiple of its rate; 0 keeps them frozen.
        predictability: weight of `losses.routing_divergence` beside the loss of student_sft and on_policy; 0: not computed.
    """

    loss: str
    features: str
    joint_lr: float
    predictability: float


@dataclass(frozen=True)
class OnPolicy:
    """Phase 3: rounds of rollout -> score -> train.

    Attributes:
        loss: reverse_kl, or one of the controls forward_kl, reverse_kl_no_tail, sampled_token (losses.py).
        top_k: teacher's tokens that the divergence tells apart; at most the vocabulary, which makes it exact.
    """

    rounds: int
    loss: str
    top_k: int


@dataclass(frozen=True)
class Export:
    """The model directory, and the reference traces that go with it."""

    directory: str
    trace_prompts: int
    trace_tokens: int
    trace_top: int


@dataclass(frozen=True)
class Inputs:
    """Adapters that a phase starts from: a file, a run directory, `auto` (the newest of the phases before), or empty."""

    prerouter: str
    lora: str


@dataclass(frozen=True)
class Logger:
    """metrics.jsonl is always written; wandb is offline, online or disabled."""

    wandb: str
    project: str
    every: int
    checkpoint_every: int


@dataclass(frozen=True)
class Config:
    """One run of one phase."""

    phase: str
    chain: tuple[str, ...]
    seed: int
    threads: int
    root: str
    run_dir: str
    resume: bool
    dry_run: bool
    tier: Tier
    base: Base
    teacher: Teacher
    text: Text
    sample: Sample
    optim: Optim
    heads: Heads
    on_policy: OnPolicy
    export: Export
    inputs: Inputs
    logger: Logger


def config_directory() -> Path:
    """Where the YAML files lie: inside the package in a wheel, at the top of a checkout."""
    packaged = Path(__file__).parent / "configs"
    return packaged if packaged.is_dir() else Path(__file__).parents[1] / "configs"


def asset(name: str) -> str:
    """Path of a file or directory that comes with the package (`${asset:nano-teacher}` in the YAML)."""
    return str(Path(__file__).parent / "assets" / name)


OmegaConf.register_new_resolver("asset", asset, replace=True)


def read_config(composed: Any) -> Config:
    """Resolve and validate a composed configuration. Raises Edge0Error naming field, value and fix."""
    missing = sorted(_unset(OmegaConf.to_container(composed)))
    if missing:
        raise Edge0Error(f"{', '.join(missing)}: not set; give a value on the command line, e.g. {missing[0]}=...")
    try:
        data = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise Edge0Error(f"configuration: {str(error).splitlines()[0]}") from error
    assert isinstance(data, dict)
    config = _build(Config, {key: value for key, value in data.items() if key != "hydra"}, "")
    _validate(config)
    return config


def _unset(data: Any, where: str = "") -> Iterator[str]:
    """Keys whose value is `???` (OmegaConf's own function stumbles over interpolations of such a key)."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _unset(value, f"{where}{key}.")
        elif value == "???":
            yield f"{where}{key}"


def to_dict(config: Config) -> dict[str, Any]:
    """Plain data, for the run directory's resolved config."""
    return dataclasses.asdict(dataclasses.replace(config, tier=None)) | {"tier": config.tier.to_dict()}  # type: ignore[arg-type]


def _build(cls: Any, data: Any, where: str) -> Any:
    if cls is Tier:
        return Tier.from_dict(data)
    if not isinstance(data, Mapping):
        raise Edge0Error(f"{where}: {data!r} is not a group of fields")
    hints = typing.get_type_hints(cls)
    check_fields(where or "config", cls, data)
    names = [f.name for f in dataclasses.fields(cls)]
    return cls(**{name: _value(hints[name], data[name], f"{where}.{name}".lstrip(".")) for name in names})


def _value(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, where)
    if hint is float and type(value) is int:
        return float(value)
    if hint == tuple[str, ...] and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    expected = hint if isinstance(hint, (type, types.UnionType)) else object
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        raise Edge0Error(f"{where}: {value!r} is not of type {getattr(hint, '__name__', hint)}")
    return value


def _validate(config: Config) -> None:
    def one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
        if value not in allowed:
            raise Edge0Error(f"{field}: {value!r} is unknown; choose one of {', '.join(allowed)}")

    def at_least(field: str, value: float, least: float) -> None:
        if not value >= least:
            raise Edge0Error(f"{field}: {value} is below {least}; raise it")

    one_of("phase", config.phase, PHASE_NAMES)
    for name in config.chain:
        one_of("chain", name, PHASE_NAMES)
    one_of("heads.features", config.heads.features, ("base", "student"))
    one_of("base.dtype", config.base.dtype, ("float32", "bfloat16"))
    one_of("base.storage", config.base.storage, ("bf16", "packed"))
    one_of("base.residency", config.base.residency, RESIDENCIES)
    if config.base.residency != "device" and config.base.storage != "packed":
        raise Edge0Error(
            f"base.residency: {config.base.residency} needs base.storage=packed (it is {config.base.storage}); set both"
        )
    one_of("sample.backend", config.sample.backend, ("transformers", "vllm"))
    one_of("optim.schedule", config.optim.schedule, ("constant", "cosine"))
    one_of("heads.loss", config.heads.loss, ("kl", "bce", "kl_margin"))
    one_of("on_policy.loss", config.on_policy.loss, ON_POLICY_LOSSES)
    one_of("logger.wandb", config.logger.wandb, ("offline", "online", "disabled"))
    for field, value, least in (
        ("optim.steps", config.optim.steps, 1),
        ("optim.rows", config.optim.rows, 1),
        ("optim.micro_rows", config.optim.micro_rows, 1),
        ("optim.warmup", config.optim.warmup, 0),
        ("optim.patience", config.optim.patience, 0),
        ("sample.max_truncated", config.sample.max_truncated, 0),
        ("sample.max_repetitive", config.sample.max_repetitive, 0),
        ("sample.max_growth", config.sample.max_growth, 1),
        ("sample.prompts", config.sample.prompts, 1),
        ("sample.eval_prompts", config.sample.eval_prompts, 1),
        ("sample.batch", config.sample.batch, 1),
        ("sample.max_new_tokens", config.sample.max_new_tokens, 1),
        ("sample.temperature", config.sample.temperature, 0),
        ("heads.joint_lr", config.heads.joint_lr, 0),
        ("heads.predictability", config.heads.predictability, 0),
        ("on_policy.rounds", config.on_policy.rounds, 1),
        ("on_policy.top_k", config.on_policy.top_k, 1),
        ("logger.every", config.logger.every, 1),
        ("logger.checkpoint_every", config.logger.checkpoint_every, 1),
        ("threads", config.threads, 1),
        ("text.pack_length", config.text.pack_length, 0),
        ("seed", config.seed, 0),
        ("optim.weight_decay", config.optim.weight_decay, 0),
        ("export.trace_prompts", config.export.trace_prompts, 1),
        ("export.trace_tokens", config.export.trace_tokens, 1),
        ("export.trace_top", config.export.trace_top, 1),
    ):
        at_least(field, value, least)
    if not 0 < config.sample.top_p <= 1:
        raise Edge0Error(f"sample.top_p: {config.sample.top_p} must lie in (0, 1]")
    vocabulary = config.tier.architecture["vocab_size"]
    if config.on_policy.top_k > vocabulary:
        raise Edge0Error(
            f"on_policy.top_k: {config.on_policy.top_k} is larger than the vocabulary of {vocabulary};"
            " lower it (equal is the exact KL)"
        )
    if not config.optim.lr > 0:
        raise Edge0Error(f"optim.lr: {config.optim.lr} must be larger than 0")
