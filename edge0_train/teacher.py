"""The teacher of a run: whether it fits tier and base, what it is called in provenance, and the model itself."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from edge0_runtime.contract.checkpoint import SHARD_PATTERN, Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import raise_problems, sha256_file
from edge0_runtime.contract.provenance import Teacher
from edge0_train.adapters import base_info, hash_files
from edge0_train.base.load import DTYPES, EXPERTS, load_teacher
from edge0_train.base.names import is_quantised, read_model_config
from edge0_train.base.quantize_model import check_tensors
from edge0_train.config import Config
from edge0_train.data.chat import Chat
from edge0_train.student import StudentPath

OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.msgpack", "*.h5")


def check_teacher(config: Config) -> str:
    """Whether `teacher.directory` is the tier's original: family, sizes, K, tensors, tokenizer; config.json and headers are read.

    A vocabulary that is padded beyond the tier's is allowed, since no id of the tokenizer lies there: `build_teacher` cuts it.
    A dry run passes over weights and a tokenizer that are not there yet.

    Returns:
        What the plan says of the teacher.

    Raises:
        Edge0Error: one sentence for what doesn't fit, or a list of all fields or tensors.
    """
    directory, tier = Path(config.teacher.directory), config.tier
    where = f"teacher.directory: {directory}"
    if not (directory / "config.json").is_file():
        lacks = "has no config.json" if directory.is_dir() else "is no directory"
        raise Edge0Error(f"{where} {lacks}; give the transformers directory of {tier.model}")
    found = read_model_config(directory / "config.json", tier.layout, "teacher.directory")
    if is_quantised(found):
        raise Edge0Error(f"{where} is quantised; give the original in bfloat16 or float32, as phase=quantize reads it")
    described = Checkpoint(directory, found, {})
    differences, cut = described.differences(tier), _cut(config, described.text_config())
    if cut:
        differences.pop("vocab_size")
    raise_problems(
        f"{where} is not the original of tier {tier.name} ({tier.model})",
        differences.values(),
        "give the model that the base was made from, or choose its tier",
    )
    weights = _check_weights(config, directory)
    ids = _check_vocabulary(config, directory)
    plan = f"{directory.name}{weights}, by its own gates at K={tier.base_k}"
    if cut:
        plan += (
            f"; its vocabulary is padded to {described.text_config()['vocab_size']:,}: its logits are cut at the tier's {cut:,},"
            f" which hold all {ids:,} ids of the tokenizer"
        )
    return plan


def vocabulary_cut(config: Config) -> int | None:
    """The tier's vocabulary, where the teacher's is padded beyond it; None where they are equal."""
    file = Path(config.teacher.directory) / "config.json"
    found = read_model_config(file, config.tier.layout, "teacher.directory")
    return _cut(config, Checkpoint(file.parent, found, {}).text_config())


def _cut(config: Config, text_config: Mapping[str, Any]) -> int | None:
    rows, vocabulary = text_config.get("vocab_size"), config.tier.architecture["vocab_size"]
    return vocabulary if type(rows) is int and rows > vocabulary else None


def _check_weights(config: Config, directory: Path) -> str:
    """Compare the headers with the model of config.json; what the plan says when there are none (a dry run)."""
    if any(directory.glob(SHARD_PATTERN)):
        check_tensors(Checkpoint.open(directory), config.tier.layout)
        return ""
    others = sorted(path.name for pattern in OTHER_WEIGHTS for path in directory.glob(pattern))
    if others:
        raise Edge0Error(
            f"teacher.directory: {directory} has {others[0]} but no {SHARD_PATTERN}; only safetensors is read: give a"
            " directory of the same model that has it"
        )
    if not config.dry_run:
        raise Edge0Error(f"teacher.directory: {directory} has no {SHARD_PATTERN}; download the model's weights")
    return " (no weights here yet)"


def _check_vocabulary(config: Config, directory: Path) -> int:
    """Number of the tokenizer's ids, after comparing it with the tier and the base; 0 for a dry run that has none at hand."""
    if config.dry_run and not (directory / "tokenizer.json").is_file():
        return 0
    check_tokenizer(config)
    return Chat(directory).check_vocabulary("teacher.directory", config.tier)


def check_tokenizer(config: Config) -> None:
    """Raise Edge0Error unless teacher and base (as soon as there is one) share tokenizer, end tokens and chat template."""
    teacher, base = config.teacher.directory, config.base.directory
    teacher_hash = hash_tokenizer(teacher)
    if not Path(base).exists():
        return
    info = base_info(config)
    if teacher_hash != info.tokenizer_hash:
        raise Edge0Error(
            f"teacher.directory: tokenizer.json of {teacher} ({teacher_hash[:12]}) is not the base's"
            f" ({info.tokenizer_hash[:12]}); teacher and student must share one tokenizer"
        )
    teacher_ends, base_ends = Chat(teacher).end_ids, Chat(base).end_ids
    if teacher_ends != base_ends:
        raise Edge0Error(
            f"teacher.directory: end tokens {teacher_ends} of {teacher} are not the base's {base_ends};"
            " give both the same eos_token_id in generation_config.json"
        )
    if template_hash(teacher) != info.template_hash:
        raise Edge0Error(
            f"teacher.directory: the chat template of {teacher} is not the base's, so its text would not be what is served;"
            f" copy chat_template.jinja of the one that is right to the other ({base})"
        )


def hash_tokenizer(directory: str) -> str:
    """sha256 of tokenizer.json. Raises Edge0Error when it is missing."""
    file = Path(directory) / "tokenizer.json"
    if not file.is_file():
        raise Edge0Error(f"{directory}: has no tokenizer.json; give a model directory with its tokenizer")
    return sha256_file(file)


def template_hash(directory: str) -> str | None:
    """`Checkpoint.template_hash` of a directory, whose shards are not looked at."""
    return Checkpoint(Path(directory), {}, {}).template_hash()


@functools.cache
def identify_teacher(directory: str) -> Teacher:
    """The teacher's name and the hash of its weight files: tens of GB for a real one, so once a process."""
    return Teacher(Path(directory).name, hash_files(sorted(Path(directory).glob("*.safetensors"))))


def build_teacher(config: Config) -> StudentPath:
    """The teacher, native at its published K, with the vocabulary of the tier.

    Raises Edge0Error as `check_teacher`, and naming its weights that are not finite: a NaN there would show as text, or as a
    loss, much later.
    """
    check_teacher(config)
    model: PreTrainedModel = load_teacher(
        config.teacher.directory, dtype=DTYPES[config.base.dtype], device=config.base.device
    )
    cut = vocabulary_cut(config)
    if cut:
        model.resize_token_embeddings(cut, mean_resizing=False)
    broken = [name for name, value in model.named_parameters() if not value.isfinite().all()]
    if broken:
        raise Edge0Error(
            f"teacher.directory: {config.teacher.directory} has values that are not finite in {len(broken)} tensors"
            f" ({', '.join(broken[:3])}); download it again"
        )
    model.set_experts_implementation(EXPERTS)
    model.requires_grad_(False)
    return StudentPath(model, dataclasses.replace(config.tier, router=config.tier.router.plain))
