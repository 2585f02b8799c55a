"""From a configuration to the objects of a phase: chat, base, student, adapters, and what a run is made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from edge0_runtime.contract.artifacts import KINDS, Adapter, Kind
from edge0_runtime.contract.binding import check_binding
from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_train.adapters import BaseInfo, base_info, input_path, read_input
from edge0_train.base import load_base
from edge0_train.base.layout import pack_sketch
from edge0_train.base.load import DTYPES, EXPERTS, empty_model
from edge0_train.base.names import mlx_config, own_fields, read_model_config, tier_config
from edge0_train.base.weights import Residency
from edge0_train.config import Config
from edge0_train.data.chat import Chat
from edge0_train.data.rows import TextData, read_card
from edge0_train.student import PrerouterHeads, StudentPath, add_lora, load_lora
from edge0_train.teacher import check_teacher

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Student:
    """A student ready to run: the path, its chat, and the adapters that it was made from."""

    path: StudentPath
    chat: Chat
    base: BaseInfo
    prerouter: Adapter | None
    lora: Adapter | None


def build_student(config: Config, *, prerouter: str = "", lora: str = "", new_lora: bool = False) -> Student:
    """Base with the given adapters (files or run directories; empty: none), bindings checked.

    Args:
        new_lora: put an untrained LoRA on the base when `lora` is empty.
    """
    base = base_info(config)
    heads_file, lora_file = read_input(config, "prerouter", prerouter), read_input(config, "lora", lora)
    check_binding(base.identity, heads_file, lora_file)
    chat = Chat(config.base.directory)
    chat.check_vocabulary("base.directory", config.tier)
    packed = cast(Residency, config.base.residency) if config.base.storage == "packed" else None
    model, _ = load_base(
        config.base.directory, config.tier, dtype=DTYPES[config.base.dtype], device=config.base.device, packed=packed
    )
    model.set_experts_implementation(EXPERTS)
    heads = load_heads(heads_file, config.base.device) if heads_file else None
    if lora_file or new_lora:
        torch.manual_seed(config.seed)
        add_lora(model, config.tier)
        if lora_file:
            load_lora(model, config.tier, lora_file.tensors)
        if config.base.gradient_checkpointing:
            checkpoint_layers(model)
    return Student(StudentPath(model, config.tier, heads), chat, base, heads_file, lora_file)


def in_float32(config: Config) -> Config:
    """What phase=export computes with, whatever `base.dtype` trained in: where that is another, the base stays packed."""
    if config.base.dtype == "float32":
        return config
    return dataclasses.replace(config, base=dataclasses.replace(config.base, dtype="float32", storage="packed"))


def load_heads(adapter: Adapter, device: torch.device | str) -> PrerouterHeads:
    """Heads with the values of a prerouter file, frozen."""
    heads = PrerouterHeads(adapter.tier).to(device)
    heads.load(adapter.tensors)
    return heads.requires_grad_(False)


def warm_heads(path: StudentPath) -> PrerouterHeads:
    """Untrained heads: the next layer's router applied to this layer's hidden state (docs/method.md 1.3)."""
    heads = PrerouterHeads(path.tier).to(path.model.device)
    heads.warm_start(lambda layer: path.router(layer).weight)
    return heads


def sketch_student(config: Config, *, lora: bool, heads: bool) -> StudentPath:
    """The student's modules and shapes on the meta device, for plans: no weights and no adapters are read.

    They are those of the config.json of `base.directory`, or before phase=quantize has run, that of `base.source`, or before
    there is any, of the tier.
    """
    layout = config.tier.layout
    places = [Path(place) for place in (config.base.directory, config.base.source) if place]
    file = next((place / "config.json" for place in places if (place / "config.json").is_file()), None)
    if file is None:
        found = mlx_config(layout, own_fields(tier_config(config.tier, **dict.fromkeys(SPECIAL_IDS))))
    else:
        found = read_model_config(file, layout, "base.directory")
    described = Checkpoint(file.parent if file else Path(), found, {})
    described.check_architecture(config.tier)
    model = empty_model(described.text_config(), layout, DTYPES[config.base.dtype])
    model.requires_grad_(False)
    if config.base.storage == "packed":
        pack_sketch(model, found, layout, DTYPES[config.base.dtype])
    with torch.device("meta"):
        if lora:
            add_lora(model, config.tier)
        return StudentPath(model, config.tier, PrerouterHeads(config.tier).requires_grad_(False) if heads else None)


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Keep only every layer's input for backward, and compute the layer again there; without gradients nothing changes."""
    model.activation_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # transformers asks for it; what is inside the layer stays in eval mode


def input_identity(config: Config) -> dict[str, Any]:
    """What a run is made from, for its inputs.json: base, adapters, and the teacher or else the rows that a teacher wrote.

    Fingerprints cover names, shapes and the ends of all tensors (`Checkpoint.fingerprint`); an adapter's provenance has the
    sha256 of the teacher's whole files. The base is null before phase=quantize.
    """
    base = None
    if config.phase != "teacher_text":
        info = base_info(config)
        base = {
            "fingerprint": info.fingerprint,
            "config": dict(info.identity.config),
            "tokenizer_sha256": info.tokenizer_hash,
            "template_sha256": info.template_hash,
        }
    if config.phase in ("teacher_text", "on_policy"):
        check_teacher(config)
        teacher = Checkpoint.open(config.teacher.directory)
        made_from = {
            "teacher": {
                "name": teacher.directory.name,
                "fingerprint": teacher.fingerprint(),
                "tokenizer_sha256": teacher.tokenizer_hash(),
                "template_sha256": teacher.template_hash(),
            }
        }
    else:
        card = read_card(config.text.rows)
        made_from = {"text": {"fingerprint": card["fingerprint"], "teacher": card.get("teacher")}}
    adapters: dict[str, Any] = {
        f"{kind}_sha256": _hash_input(config, kind) for kind in STARTS_FROM.get(config.phase, ())
    }
    return {"base": base, **made_from, **adapters}


STARTS_FROM: dict[str, tuple[Kind, ...]] = {"head_refine": ("prerouter",), "student_sft": KINDS, "on_policy": KINDS}
"""The adapters that a phase goes on from."""


def _hash_input(config: Config, kind: Kind) -> str | None:
    adapter = read_input(config, kind, input_path(config, kind))
    return adapter.sha256 if adapter else None


def check_card(config: Config, card: Mapping[str, Any], base: BaseInfo) -> None:
    """Raise Edge0Error if rows with this card were written with another tokenizer or chat template; cards of old name neither."""
    for what, key, ours in (
        ("tokenizer", "tokenizer_sha256", base.tokenizer_hash),
        ("chat template", "template_sha256", base.template_hash),
    ):
        found = card.get(key, ours)
        if found != ours:
            raise Edge0Error(
                f"text.rows: {config.text.rows} was written with another {what} ({str(found)[:12]}) than the base's"
                f" ({str(ours)[:12]}); run phase=teacher_text again with a teacher that shares it"
            )


def check_text(config: Config, student: Student, data: TextData) -> None:
    """`check_card`, and say so where the card names no teacher."""
    check_card(config, data.card, student.base)
    if "teacher" not in data.card:
        print(
            f"text.rows: the card of {config.text.rows} is an older version's and names no teacher; provenance will say"
            f" {data.teacher.id!r}"
        )
