"""From a configuration to the objects of a phase: chat, base, student, adapters, provenance."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from edge0_runtime.contract.artifacts import Adapter, Kind, check_binding, read_adapter, write_adapter
from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import sha256_file
from edge0_runtime.contract.provenance import DataSource, PhaseRecord, Provenance, Teacher
from edge0_train.base import load_base, load_teacher
from edge0_train.config import Config
from edge0_train.data.chat import Chat
from edge0_train.run import code_commit
from edge0_train.student import PrerouterHeads, StudentPath, add_lora, load_lora

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class BaseInfo:
    """Identity of the base that adapters are bound to."""

    fingerprint: str
    tokenizer_hash: str
    template_hash: str | None


@dataclass(frozen=True)
class Student:
    """A student ready to run: the path, its chat, and the adapters that it was made from."""

    path: StudentPath
    chat: Chat
    base: BaseInfo
    prerouter: Adapter | None
    lora: Adapter | None


def base_info(config: Config) -> BaseInfo:
    """Fingerprint and tokenizer of `base.directory`. Raises Edge0Error when it is not the tier's base."""
    checkpoint = Checkpoint.open(Path(config.base.directory))
    checkpoint.check_architecture(config.tier)
    return BaseInfo(checkpoint.fingerprint(), checkpoint.tokenizer_hash(), checkpoint.template_hash())


def build_student(config: Config, *, prerouter: str = "", lora: str = "", new_lora: bool = False) -> Student:
    """Base with the given adapters (files or run directories; empty: none), bindings checked.

    Args:
        new_lora: put an untrained LoRA on the base when `lora` is empty.
    """
    base = base_info(config)
    heads_file, lora_file = read_input(config, "prerouter", prerouter), read_input(config, "lora", lora)
    check_binding(base.fingerprint, heads_file, lora_file)
    model, _ = load_base(config.base.directory, config.tier, dtype=DTYPES[config.base.dtype], device=config.base.device)
    model.set_experts_implementation(experts_implementation(config.base.device))
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
    model.set_experts_implementation(experts_implementation(config.base.device))
    return StudentPath(model, config.tier)


def experts_implementation(device: str) -> str:
    """transformers' expert kernel: grouped_mm is the fastest on both CPU and CUDA at training shapes (parity.md 3)."""
    return "grouped_mm"


def hash_tokenizer(directory: str) -> str:
    """sha256 of tokenizer.json. Raises Edge0Error when it is missing."""
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise Edge0Error(f"{directory}: has no tokenizer.json; give a model directory with its tokenizer")
    return sha256_file(path)


def read_input(config: Config, kind: Kind, value: str) -> Adapter | None:
    """The adapter at `value`: a file, or a run directory that holds the tier's file; None for an empty value."""
    if not value:
        return None
    path = Path(value)
    if path.is_dir():
        path = path / config.tier.file_name(kind)
    if not path.is_file():
        raise Edge0Error(f"inputs.{kind}: {path} does not exist; run the phase that writes it, or set inputs.{kind}")
    adapter = read_adapter(path, kind, fallback_tier=config.tier)
    if adapter.tier != config.tier:
        raise Edge0Error(
            f"inputs.{kind}: {path} was trained for another tier contract ({adapter.tier.name}, K={adapter.tier.k});"
            f" this run has {config.tier.name}, K={config.tier.k}"
        )
    return adapter


def write_output(
    config: Config,
    kind: Kind,
    tensors: Mapping[str, np.ndarray],
    base: BaseInfo,
    result: Mapping[str, Any],
    data: DataSource,
    parents: Mapping[str, Adapter | None],
) -> str:
    """Write this phase's adapter into its run directory, with the chain of phases that led to it; returns its sha256.

    `result` is the loop's summary: its steps, tokens and final numbers go into the chain.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    chain: dict[str, PhaseRecord] = {}
    for parent in parents.values():
        if parent and parent.provenance:
            chain |= {record.run_id: record for record in parent.provenance.phases}
    this = PhaseRecord(
        phase=config.phase,
        run_id=f"{Path(config.root).name}/{Path(config.run_dir).name}",  # no absolute path leaves the machine
        parents={name: parent.sha256 for name, parent in parents.items() if parent},
        seed=config.seed,
        steps=result["steps"],
        tokens=result["tokens"],
        rows=config.optim.rows * result["steps"],
        metrics={name: value for name, value in result.items() if isinstance(value, float)},
        time=now,
    )
    prerouter = parents.get("prerouter")
    provenance = Provenance(
        tool_version=tool_version(),
        commit=code_commit(),
        phases=(*chain.values(), this),
        base_fingerprint=base.fingerprint,
        tokenizer_hash=base.tokenizer_hash,
        template_hash=base.template_hash,
        teacher=Teacher(
            Path(config.teacher.directory).name,
            hash_files(sorted(Path(config.teacher.directory).glob("*.safetensors"))),
        ),
        data=data,
        prerouter_sha256=prerouter.sha256 if kind == "lora" and prerouter else None,
        created=now,
    )
    return write_adapter(Path(config.run_dir) / config.tier.file_name(kind), kind, config.tier, tensors, provenance)


def hash_files(paths: Sequence[Path]) -> str:
    """sha256 over names and contents of files, in order."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name}:{sha256_file(path)}\n".encode())
    return digest.hexdigest()


def tool_version() -> str:
    try:
        return version("edge0")
    except PackageNotFoundError:
        return "0+unknown"
