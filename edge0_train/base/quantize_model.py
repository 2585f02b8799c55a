"""A transformers directory -> the int4 MLX directory to deploy, bit for bit as `mlx_lm.convert -q` makes it.

    summary = quantize_checkpoint("runs/nano-teacher/model", "models/nano-int4", tier)

Tensors are read, quantised and written one transformers parameter at a time, at offsets planned from the
headers alone: memory stays at a few copies of the largest parameter. Unlike mlx-lm this also reads the
per-expert names and the flat config of `save_pretrained`, and needs no mlx.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edge0_runtime.contract.checkpoint import INDEX_NAME, Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import raise_problems
from edge0_runtime.contract.tier import Tier
from edge0_train.base.affine import quantize
from edge0_train.base.load import empty_model, parameter_shapes
from edge0_train.base.names import FamilyNames, Link, family_names
from edge0_train.base.weights import FLOATS, TORCH_DTYPES, read_tensor

BITS = {"int4": 4, "int8": 8}
GROUP_SIZE = 64
SHARD_BYTES = 5 << 30  # mlx-lm's
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_CAST_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Target:
    """One MLX tensor to write: of `dtype` if `bits` is 0; else packed, with scales and biases of `dtype`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: int

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    def stored(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """{tensor name: (shape, dtype)} as written."""
        if not self.bits:
            return {self.name: (self.shape, self.dtype)}
        *rows, width = self.shape
        groups = (*rows, width // GROUP_SIZE)
        return {
            self.name: ((*rows, width * self.bits // 32), torch.uint32),
            f"{self.module}.scales": (groups, self.dtype),
            f"{self.module}.biases": (groups, self.dtype),
        }

    def make(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors to write, from the float one. Raises Edge0Error if a value is not finite."""
        made = (tensor,) if not self.bits else quantize(tensor, self.bits, GROUP_SIZE)
        if not all(part.isfinite().all() for part in made if part.is_floating_point()):
            raise Edge0Error(
                f"{self.name}: has values that are not finite in {self.dtype}; "
                "the source is damaged, or needs a wider dtype in its config.json"
            )
        return dict(zip(self.stored(), made, strict=True))


@dataclass(frozen=True)
class Job:
    """One transformers parameter: the tensors it is read from and the MLX tensors it becomes.

    Attributes:
        whole: the source's tensor, if it is one. parts: else per target the source's tensor, or one of each expert.
        config: of the model.
    """

    link: Link
    whole: str
    parts: tuple[tuple[str, ...], ...]
    targets: tuple[Target, ...]
    config: Mapping[str, Any]

    def tensors(self, source: Checkpoint) -> Iterator[torch.Tensor]:
        """The float MLX tensors, one per target."""
        for names in self.parts:
            tensors = [read_tensor(*source.entries[name]) for name in names]
            yield self.link.part(torch.stack(tensors) if self.link.per_expert else tensors[0])
        if not self.parts:
            yield from self.link.to_mlx(read_tensor(*source.entries[self.whole]), self.config)

    def nbytes(self) -> int:
        return sum(_nbytes(*kind) for target in self.targets for kind in target.stored().values())


def quantize_checkpoint(
    source_dir: Path | str, out_dir: Path | str, tier: Tier, *, shard_bytes: int = SHARD_BYTES
) -> dict[str, Any]:
    """Write the int4 MLX directory of a transformers model; `out_dir` appears whole or not at all.

    Args:
        source_dir: config.json, safetensors, tokenizer; nested or flat config, fused or per-expert tensors.
        shard_bytes: more tensor bytes are split into several files (between parameters) with an index.

    Returns:
        What was done: dtype, modules per code width, tensors, bytes, shards, dropped tensors, copied files.

    Raises:
        Edge0Error: `out_dir` exists, the source is not the tier's model, is quantised already or incomplete,
            or no room.
    """
    out_dir = Path(out_dir)
    if out_dir.exists():
        raise Edge0Error(f"output directory {out_dir} exists; delete it or name another one")
    names = family_names(tier.family)
    source = Checkpoint.open(source_dir)
    source.check_architecture(tier)
    if {"quantization", "quantization_config"} & (source.config.keys() | source.text_config().keys()):
        raise Edge0Error(
            f"{source.directory}: its config.json says that it is quantised, and quantising again would change "
            "its values; start from the model in bfloat16 or float32"
        )
    if not (source.directory / "tokenizer.json").is_file():
        raise Edge0Error(f"{source.directory}: has no tokenizer.json; save the tokenizer beside the model")
    config = _deployed_config(source, names)
    jobs, dropped = _plan(source, config, names)
    targets = [target for job in jobs for target in job.targets]
    block: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": 4, "mode": "affine"}
    block |= {t.module: {"group_size": GROUP_SIZE, "bits": t.bits} for t in targets if t.bits not in (0, 4)}
    config["quantization"] = config["quantization_config"] = block

    total = sum(job.nbytes() for job in jobs)
    with _new_directory(out_dir, total) as partial:
        shards = _write_shards(partial, source, jobs, shard_bytes)
        _write_json(partial / "config.json", dict(sorted(config.items())))
        copied = [name for name in COPIED if (source.directory / name).is_file()]
        for name in copied:
            shutil.copyfile(source.directory / name, partial / name)
    modules = Counter(target.bits for target in targets)
    return {
        "dtype": str(targets[0].dtype).removeprefix("torch."),
        "int4_modules": modules[4],
        "int8_modules": modules[8],
        "float_tensors": modules[0],
        "tensors": sum(len(target.stored()) for target in targets),
        "bytes": total,
        "shards": shards,
        "dropped": dropped,
        "copied": copied,
    }


def _deployed_config(source: Checkpoint, names: FamilyNames) -> dict[str, Any]:
    """config.json for mlx-lm and transformers; as mlx-lm does, with generation_config.json's end tokens."""
    config = names.mlx_config(source.config)
    path = source.directory / "generation_config.json"
    if path.is_file():
        generation = json.loads(path.read_text(encoding="utf-8"))
        if generation.get("eos_token_id") is not None:
            config["eos_token_id"] = generation["eos_token_id"]
    return config


def _plan(source: Checkpoint, config: Mapping[str, Any], names: FamilyNames) -> tuple[list[Job], int]:
    """What each transformers parameter becomes, in the model's order, and how many tensors are dropped.

    Raises Edge0Error listing every tensor that is missing, left over, or of a wrong shape or dtype.
    """
    text_config = config.get("text_config", config)
    # mlx-lm's rule: a flat config's `dtype` does not count. None leaves every tensor in its own dtype.
    cast = _CAST_DTYPES.get(config.get("torch_dtype") or config.get("text_config", {}).get("dtype"))
    shapes = parameter_shapes(empty_model(text_config, names, torch.float32))
    wanted = [name for name in source.entries if not names.is_dropped(name, text_config)]
    on_disk = {names.hf_name(name): name for name in wanted}
    left_over = set(on_disk)
    jobs: list[Job] = []
    problems = [
        f"{name}: the same parameter as {on_disk[names.hf_name(name)]}"
        for name in wanted
        if on_disk[names.hf_name(name)] != name
    ]
    for hf_name, shape in shapes.items():
        links = names.links_of_hf(hf_name, text_config)
        if not links:
            problems.append(f"{hf_name}: a parameter of the transformers model without a row in its name table")
            continue
        link = links[0]
        made = link.to_mlx(torch.empty(shape, device="meta"), text_config)
        shapes_mlx = [tuple(tensor.shape) for tensor in made]
        pieces = {hf_name: tuple(shape)}
        parts: tuple[tuple[str, ...], ...] = ()
        if link.disk and hf_name not in on_disk:
            count = shape[0] if link.per_expert else 1
            parts = tuple(tuple(name.replace("{e}", str(e)) for e in range(count)) for name in link.disk)
            on_part = [tuple(link.part(tensor).shape)[link.per_expert :] for tensor in made]
            pieces = {name: part for group, part in zip(parts, on_part, strict=True) for name in group}
        found = {name: source.entries[on_disk[name]][1] for name in pieces if name in on_disk}
        left_over.difference_update(found)
        problems += [f"{name}: missing" for name in pieces if name not in found]
        problems += [
            f"{entry.name}: {entry.dtype} {list(entry.shape)}, the model needs {list(pieces[name])} of {FLOATS}"
            for name, entry in found.items()
            if entry.shape != pieces[name] or entry.dtype not in FLOATS
        ]
        dtypes = {entry.dtype for entry in found.values()}
        if len(dtypes) > 1:
            problems.append(f"{hf_name}: its parts have different dtypes, {', '.join(sorted(dtypes))}")
        if problems:
            continue
        stored = TORCH_DTYPES[dtypes.pop()]
        dtype = stored if cast is None or link.uncast else cast
        jobs.append(
            Job(
                link,
                on_disk.get(hf_name, ""),
                tuple(tuple(on_disk[name] for name in group) for group in parts),
                tuple(Target(*kind, dtype, _bits(link, kind[1])) for kind in zip(link.mlx, shapes_mlx, strict=True)),
                text_config,
            )
        )
    problems += [f"{on_disk[name]}: the model has no place for it" for name in sorted(left_over)]
    raise_problems(
        f"{source.directory}: tensors do not fit the model that config.json describes",
        problems,
        "give a complete transformers model of the tier",
    )
    return jobs, len(source.entries) - len(wanted)


def _bits(link: Link, shape: Sequence[int]) -> int:
    """Code width; 0 for a float tensor. Like mlx-lm, what groups do not divide stays float."""
    return 0 if link.stored == "float" or shape[-1] % GROUP_SIZE else BITS[link.stored]


def _nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


# -- writing


def _write_shards(directory: Path, source: Checkpoint, jobs: Sequence[Job], shard_bytes: int) -> int:
    """Write model.safetensors, or numbered shards and their index. Returns the number of shards."""
    shards: list[list[Job]] = []
    room = 0
    for job in jobs:
        if not shards or job.nbytes() > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(job)
        room -= job.nbytes()
    weight_map: dict[str, str] = {}
    for n, shard in enumerate(shards, start=1):
        numbered = f"model-{n:05d}-of-{len(shards):05d}.safetensors"
        file_name = numbered if len(shards) > 1 else "model.safetensors"
        weight_map |= dict.fromkeys(_write_shard(directory / file_name, source, shard), file_name)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(job.nbytes() for job in jobs)},
            "weight_map": dict(sorted(weight_map.items())),
        }
        _write_json(directory / INDEX_NAME, index)
    return len(shards)


def _write_shard(path: Path, source: Checkpoint, jobs: Sequence[Job]) -> list[str]:
    """Header first, from the plan; then each tensor at its place, as it is made. Returns the tensor names."""
    stored = {name: kind for job in jobs for target in job.targets for name, kind in target.stored().items()}
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    starts: dict[str, int] = {}
    end = 0
    # Wide dtypes first, so that every tensor is aligned to its own.
    for name in sorted(stored, key=lambda name: (-stored[name][1].itemsize, name)):
        shape, dtype = stored[name]
        starts[name], end = end, end + _nbytes(shape, dtype)
        offsets = [starts[name], end]
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for job in jobs:
            for target, tensor in zip(job.targets, job.tensors(source), strict=True):
                for name, part in target.make(tensor.to(target.dtype)).items():
                    assert (tuple(part.shape), part.dtype) == stored[name], name
                    file.seek(8 + len(text) + starts[name])
                    file.write(part.contiguous().view(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    return list(stored)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=4) + "\n", encoding="utf-8")


@contextmanager
def _new_directory(path: Path, needed_bytes: int) -> Iterator[Path]:
    """A directory that the body fills; it takes its name when the body is done, and vanishes if it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < needed_bytes:
        raise Edge0Error(
            f"output directory {path}: needs {needed_bytes} bytes, {free} are free; free some or name another"
        )
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    partial.mkdir()
    try:
        yield partial
        os.rename(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # after the rename there is nothing to remove
