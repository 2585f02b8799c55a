"""What a training phase is about to do, in numbers, before step 1: modules, parameters, rows, tokens, memory.

Everything follows from shapes, so that a model on the meta device (`dry_run=true`) gives the same plan as a loaded one.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft.tuners.lora import LoraLayer
from torch import nn

from edge0_runtime.contract.tier import Tier
from edge0_train.base import transformers_module
from edge0_train.base.packed import unpacked_numel
from edge0_train.config import Config, Optim
from edge0_train.data.rows import TextData, TextRow, text_of
from edge0_train.losses import CHUNK
from edge0_train.student import PrerouterHeads, StudentPath

TRAINABLE_BYTES = 16
"""A float32 value, its gradient, and AdamW's two moments."""
GIB = 2**30


@dataclass(frozen=True)
class Rows:
    """The rows that a phase trains on.

    Attributes:
        train, held_out: how many. dropped: {reason: how many}.
        mean, longest: inputs a row. labels: mean number of a row's tokens that the loss is summed over.
        writer: the teacher that wrote them, as their card says.
        assumed: there is no text yet (a dry run): every row is taken to be as long as text.max_length.
    """

    train: int
    held_out: int
    mean: float
    labels: float
    longest: int
    dropped: Mapping[str, int]
    writer: str = ""
    assumed: bool = False

    @classmethod
    def of(cls, train: Sequence[TextRow], held_out: int, dropped: Mapping[str, int]) -> Rows:
        """Of train rows that are there; a row of n tokens has n - 1 inputs."""
        inputs = [row.length - 1 for row in train]
        labels = sum(len(row.completion_ids) for row in train) / len(train)
        return cls(len(train), held_out, sum(inputs) / len(train), labels, max(inputs), dropped)

    @classmethod
    def planned(cls, config: Config) -> Rows:
        """For a dry run: the rows of text.rows if they are there, else the most that configuration allows."""
        if (Path(config.text.rows) / "card.json").is_file():
            data, dropped = text_of(config)
            return cls.of_data(data, dropped)
        longest = config.text.max_length - 1
        labels = float(min(longest, config.sample.max_new_tokens))
        return cls(config.sample.prompts, config.sample.eval_prompts, longest, labels, longest, {}, assumed=True)

    @classmethod
    def of_data(cls, data: TextData, dropped: Mapping[str, int]) -> Rows:
        """Of what `text_of` returns."""
        return dataclasses.replace(cls.of(data.train, len(data.held_out), dropped), writer=data.teacher.id)


def training_plan(
    config: Config, path: StudentPath, trainable: Mapping[str, nn.Parameter], rows: Rows, *, through_base: bool
) -> dict[str, str]:
    """{label: text} of what every training phase says.

    Args:
        path: the base with its LoRA and heads, as far as there are any; may be on the meta device.
        trainable: {name: parameter}, of the model or of the heads.
        through_base: whether gradients run through the base (phases 2 and 3), or the base only runs forward (heads).
    """
    facts = {"settings": describe_settings(config), "rows": describe_rows(rows)}
    modules = lora_modules(path.model, config.tier)
    if modules:
        facts["LoRA"] = "\n".join(
            [f"{sum(n for _, n in modules)} modules matched, r={config.tier.lora.r}, alpha={config.tier.lora.alpha}"]
            + [f"{count:>3} x {kind}" for kind, count in modules]
        )
    heads = _numel(path.heads.parameters()) if path.heads else 0
    frozen = unpacked_numel(path.model) + heads - _numel(trainable.values())
    facts["parameters"] = f"{_numel(trainable.values()):,} trainable, {frozen:,} frozen"
    facts["step"] = describe_step(rows, config.optim)
    facts["memory"] = describe_memory(config, path, trainable, rows, through_base)
    return facts


def head_plan(
    config: Config, path: StudentPath, heads: PrerouterHeads | None, rows: Rows, features: str
) -> dict[str, str]:
    """`training_plan` for heads, and what they are; `path` and `heads` may be on the meta device.

    Args:
        features: whose they see: the "base"'s under native routing, or the "student"'s.
    """
    assert heads is not None
    tier = config.tier
    facts = training_plan(config, path, dict(heads.named_parameters()), rows, through_base=False)
    shape = f"{tier.head_input} -> {tier.head_width} -> {tier.num_experts}"
    return facts | {
        "heads": f"{len(tier.owners)} (owners {tier.owners[0]}..{tier.owners[-1]}), {shape}, on {features} features,"
        f" {config.heads.loss} loss"
    }


def describe_settings(config: Config) -> str:
    """The resolved configuration, a group a line (the tier has a file of its own)."""
    lines = []
    for name in ("base", "teacher", "text", "sample", "optim", "heads", "on_policy", "inputs", "logger"):
        fields = dataclasses.asdict(getattr(config, name))
        lines.append(f"{name}: " + ", ".join(f"{field}={value}" for field, value in fields.items()))
    return "\n".join([f"threads={config.threads}, resume={config.resume}, root={config.root}", *lines])


def describe_rows(rows: Rows) -> str:
    """How many rows train and are held out, and why others were dropped; or that none is written yet."""
    if rows.assumed:
        return f"no text yet: {rows.train:,} train rows of text.max_length assumed"
    dropped = ", ".join(f"{count} {reason}" for reason, count in rows.dropped.items()) or "none"
    writer = f"; written by {rows.writer}" if rows.writer else ""
    return f"{rows.train:,} train, {rows.held_out:,} held out (dropped: {dropped}){writer}"


def describe_step(rows: Rows, optim: Optim) -> str:
    """rows x mean length -> tokens of a step, of the run, and how often the data is seen."""
    tokens, labels = optim.rows * rows.mean, optim.rows * rows.labels
    return (
        f"{optim.rows} rows x {rows.mean:.1f} tokens = {tokens:,.0f} ({labels:,.0f} of them completion), in micro-batches of"
        f" {optim.micro_rows} rows\n{optim.steps} steps = {optim.steps * tokens:,.0f} tokens ="
        f" {optim.steps * optim.rows / rows.train:.2f} epochs over {rows.train:,} rows"
    )


def lora_modules(model: nn.Module, tier: Tier) -> list[tuple[str, int]]:
    """[("<module below its layer> [in -> out]", how many)] of the modules that carry a LoRA, in the tier's order."""
    found: Counter[tuple[int, str]] = Counter()
    for name in tier.lora_modules():
        module: Any = model.get_submodule(transformers_module(tier.family, name))
        if isinstance(module, LoraLayer):
            at = next(n for n, target in enumerate(tier.lora.targets) if name.endswith(f".{target}"))
            found[at, f"{tier.lora.targets[at]} [{module.in_features} -> {module.out_features}]"] += 1
    return [(kind, count) for (_, kind), count in sorted(found.items())]


def describe_memory(
    config: Config, path: StudentPath, trainable: Mapping[str, nn.Parameter], rows: Rows, through_base: bool
) -> str:
    """Estimated peak of the device's memory, with the formula of every part (H hidden, I expert width, F head input)."""
    tier, width = config.tier, 4 if config.base.dtype == "float32" else 2
    packed = config.base.storage == "packed"
    frozen = [*_others(path, trainable), *(path.model.buffers() if config.base.residency == "device" else ())]
    tokens = _tokens_of_a_micro_batch(config, rows)
    layers, hidden, experts = tier.num_layers, tier.hidden_size, tier.num_experts
    one_layer = 12 * hidden + tier.k * (2 * hidden + 3 * tier.expert_width)
    parts = {
        f"frozen values ({'int4' if packed else config.base.dtype} base)": sum(
            t.numel() * t.element_size() for t in frozen
        ),
        f"trainables x {TRAINABLE_BYTES} B (value, gradient, two moments)": TRAINABLE_BYTES
        * _numel(trainable.values()),
    }
    if packed:
        wide = tier.expert_width
        parts[f"one layer's experts while it runs: E x 5 H I x {width} B"] = experts * 5 * hidden * wide * width
    if config.phase == "on_policy" and config.teacher.resident:
        parts[f"the teacher, as many values as the base ({config.base.dtype})"] = width * unpacked_numel(path.model)
    if not through_base:
        head = 2 * tier.head_input + 2 * experts + 2 * tier.head_width
        formula = f"{tokens:,} tokens x ({width} B x one layer's (12 H + K (2 H + 3 I)) + 4 B x one head's (2 F + 2 E + 2 width))"
        parts[f"activations: {formula}"] = tokens * (width * one_layer + 4 * head)
    else:
        if config.base.gradient_checkpointing:
            formula, kept = "(layers x H + one layer's (12 H + K (2 H + 3 I)))", layers * hidden + one_layer
        else:
            formula, kept = "layers x (12 H + K (2 H + 3 I))", layers * one_layer
        parts[f"activations: {tokens:,} tokens x {formula} x {width} B"] = tokens * kept * width
        chunk = min(CHUNK, tokens)
        parts[f"logits: {chunk:,} tokens a chunk x vocabulary x 3 x 4 B"] = 12 * chunk * tier.architecture["vocab_size"]
    lines = [f"{size / GIB:8.3f} GiB {name}" for name, size in parts.items()]
    return "\n".join([f"about {sum(parts.values()) / GIB:.2f} GiB at the peak: an estimate, the sum of", *lines])


def _tokens_of_a_micro_batch(config: Config, rows: Rows) -> int:
    """Inputs of the largest micro-batch, padding included."""
    line = config.text.pack_length
    if not line:
        return config.optim.micro_rows * rows.longest
    return math.ceil(config.optim.micro_rows * rows.mean / line) * max(line, rows.longest)


def _others(path: StudentPath, trainable: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
    """Parameters of base and heads that do not train."""
    mine = {id(p) for p in trainable.values()}
    heads = path.heads.parameters() if path.heads else ()
    return [p for p in (*path.model.parameters(), *heads) if id(p) not in mine]


def _numel(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)
