"""From a configuration to the objects of a phase: chat, base, student, adapters, provenance."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from edge0_runtime.contract.artifacts import Adapter
from edge0_runtime.contract.binding import check_binding
from edge0_runtime.contract.checkpoint import SHARD_PATTERN, Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import read_json, sha256_file
from edge0_train.adapters import BaseInfo, base_info, read_input
from edge0_train.base import load_base, load_teacher
from edge0_train.base.layout import pack_sketch
from edge0_train.base.load import empty_model
from edge0_train.base.names import mlx_config, own_fields, tier_config
from edge0_train.base.weights import Residency
from edge0_train.config import Config
from edge0_train.data.chat import Chat
from edge0_train.data.rows import TextData
from edge0_train.student import PrerouterHeads, StudentPath, add_lora, load_lora

EXPERTS = "grouped_mm"
"""transformers' expert kernel: the fastest on CPU and CUDA at training shapes, and at decoding's on CPU (docs/parity.md 6)."""
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
    check_binding(base.fingerprint, heads_file, lora_file)
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
    return Student(StudentPath(model, config.tier, heads), Chat(config.base.directory), base, heads_file, lora_file)


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
        try:
            found = mlx_config(layout, read_json(file, "download it again"))
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise Edge0Error(f"{file}: not a model's config.json ({error}); download it again") from error
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


def build_teacher(config: Config) -> StudentPath:
    """The teacher, native at its published K; tokenizer and end tokens must be the base's.

    Raises Edge0Error naming its weights that are not finite: a NaN there would show as text, or as a loss, much later.
    """
    check_tokenizer(config)
    model: PreTrainedModel = load_teacher(
        config.teacher.directory, dtype=DTYPES[config.base.dtype], device=config.base.device
    )
    broken = [name for name, value in model.named_parameters() if not value.isfinite().all()]
    if broken:
        raise Edge0Error(
            f"teacher.directory: {config.teacher.directory} has values that are not finite in {len(broken)} tensors"
            f" ({', '.join(broken[:3])}); download it again"
        )
    model.set_experts_implementation(EXPERTS)
    return StudentPath(model, dataclasses.replace(config.tier, router=config.tier.router.plain))


def input_identity(config: Config) -> dict[str, Any]:
    """What a training run is made from, for its inputs.json: base, tokenizer, chat template, teacher.

    Fingerprints cover names, shapes and the ends of all tensors (`Checkpoint.fingerprint`); an adapter's provenance has the
    sha256 of the teacher's whole files. The base is null before phase=quantize; a teacher that is not set, or without weights
    here, has none.
    """
    base = None
    if config.phase != "teacher_text":
        info = base_info(config)
        base = {
            "fingerprint": info.fingerprint,
            "tokenizer_sha256": info.tokenizer_hash,
            "template_sha256": info.template_hash,
        }
    directory = Path(config.teacher.directory)
    teacher: dict[str, Any] = {"name": directory.name, "fingerprint": None}
    if config.teacher.directory and any(directory.glob(SHARD_PATTERN)):
        checkpoint = Checkpoint.open(directory)
        teacher |= {
            "fingerprint": checkpoint.fingerprint(),
            "tokenizer_sha256": hash_tokenizer(str(directory)),
            "template_sha256": checkpoint.template_hash(),
        }
    return {"base": base, "teacher": teacher}


def check_tokenizer(config: Config) -> None:
    """Raise Edge0Error unless teacher and base (as soon as there is one) share one tokenizer and its end tokens."""
    teacher_hash = hash_tokenizer(config.teacher.directory)
    if not Path(config.base.directory).exists():
        return
    base_hash = base_info(config).tokenizer_hash
    if teacher_hash != base_hash:
        raise Edge0Error(
            f"teacher.directory: tokenizer.json of {config.teacher.directory} ({teacher_hash[:12]}) is not the base's"
            f" ({base_hash[:12]}); teacher and student must share one tokenizer"
        )
    teacher_ends, base_ends = Chat(config.teacher.directory).end_ids, Chat(config.base.directory).end_ids
    if teacher_ends != base_ends:
        raise Edge0Error(
            f"teacher.directory: end tokens {teacher_ends} of {config.teacher.directory} are not the base's {base_ends};"
            " give both the same eos_token_id in generation_config.json"
        )


def check_text(config: Config, student: Student, data: TextData) -> None:
    """Raise Edge0Error if the rows were written with another tokenizer than the base's (cards of old have no hash)."""
    found = data.card.get("tokenizer_sha256", student.base.tokenizer_hash)
    if found != student.base.tokenizer_hash:
        raise Edge0Error(
            f"text.rows: {config.text.rows} was written with another tokenizer ({found[:12]}) than the base's"
            f" ({student.base.tokenizer_hash[:12]}); run phase=teacher_text again with a teacher that shares it"
        )


def hash_tokenizer(directory: str) -> str:
    """sha256 of tokenizer.json. Raises Edge0Error when it is missing."""
    file = Path(directory) / "tokenizer.json"
    if not file.is_file():
        raise Edge0Error(f"{directory}: has no tokenizer.json; give a model directory with its tokenizer")
    return sha256_file(file)
