"""From a configuration to the objects of a phase: chat, base, student, adapters, provenance."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from edge0_runtime.contract.artifacts import Adapter, check_binding
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import sha256_file
from edge0_train.adapters import BaseInfo, base_info, read_input
from edge0_train.base import load_base, load_teacher
from edge0_train.config import Config
from edge0_train.data.chat import Chat
from edge0_train.student import PrerouterHeads, StudentPath, add_lora, load_lora

EXPERTS = "grouped_mm"
"""transformers' expert kernel: the fastest on CPU and CUDA at training shapes, and at decoding's on CPU (parity.md 3)."""
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
    model, _ = load_base(config.base.directory, config.tier, dtype=DTYPES[config.base.dtype], device=config.base.device)
    model.set_experts_implementation(EXPERTS)
    heads = None
    if heads_file:
        heads = PrerouterHeads(config.tier).to(config.base.device)
        heads.load(heads_file.tensors)
        heads.requires_grad_(False)
    if lora_file or new_lora:
        torch.manual_seed(config.seed)
        add_lora(model, config.tier)
        if lora_file:
            load_lora(model, config.tier, lora_file.tensors)
    return Student(StudentPath(model, config.tier, heads), Chat(config.base.directory), base, heads_file, lora_file)


def build_teacher(config: Config) -> StudentPath:
    """The teacher, native at its published K; its tokenizer must be the base's."""
    teacher_hash = hash_tokenizer(config.teacher.directory)
    if Path(config.base.directory).exists() and teacher_hash != base_info(config).tokenizer_hash:
        raise Edge0Error(
            f"teacher.directory: tokenizer.json of {config.teacher.directory} ({teacher_hash[:12]}) is not the base's"
            f" ({base_info(config).tokenizer_hash[:12]}); teacher and student must share one tokenizer"
        )
    model: PreTrainedModel = load_teacher(
        config.teacher.directory, dtype=DTYPES[config.base.dtype], device=config.base.device
    )
    model.set_experts_implementation(EXPERTS)
    return StudentPath(model, config.tier)


def hash_tokenizer(directory: str) -> str:
    """sha256 of tokenizer.json. Raises Edge0Error when it is missing."""
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise Edge0Error(f"{directory}: has no tokenizer.json; give a model directory with its tokenizer")
    return sha256_file(path)
