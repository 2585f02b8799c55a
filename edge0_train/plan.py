"""What a training phase is about to do, in numbers, before step 1: modules, parameters, rows, tokens, memory.

Everything follows from shapes, so that a model on the meta device (`dry_run=true`) gives the same plan as a loaded one.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from peft.tuners.lora import LoraLayer
from torch import nn

from edge0_runtime.contract.tier import Tier
from edge0_train.base import transformers_module
from edge0_train.base.packed import unpacked_numel
from edge0_train.config import Config, Optim
from edge0_train.data.counts import Rows
from edge0_train.fit import describe_fit
from edge0_train.memory import phase_need
from edge0_train.student import PrerouterHeads, StudentPath


def training_plan(
    config: Config, path: StudentPath, trainable: Mapping[str, nn.Parameter], rows: Rows
) -> dict[str, str]:
    """{label: text} of what every training phase says.

    Args:
        path: the base with its LoRA and heads, as far as there are any; may be on the meta device.
        trainable: {name: parameter}, of the model or of the heads.
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
    return facts | memory_plan(config, rows)


def memory_plan(config: Config, rows: Rows) -> dict[str, str]:
    """{label: text}: what the phase needs at its peak, and whether that fits."""
    need = phase_need(config, rows)
    return {"memory": need.describe(), "fits": describe_fit(config, rows, need)}


def head_plan(
    config: Config, path: StudentPath, heads: PrerouterHeads | None, rows: Rows, features: str
) -> dict[str, str]:
    """`training_plan` for heads, and what they are; `path` and `heads` may be on the meta device.

    Args:
        features: whose they see: the "base"'s under native routing, or the "student"'s.
    """
    assert heads is not None
    tier = config.tier
    facts = training_plan(config, path, dict(heads.named_parameters()), rows)
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


def _numel(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)
