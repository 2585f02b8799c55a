"""A transformers directory -> the int4 MLX directory to deploy, bit for bit as `mlx_lm.convert -q` makes it.

    summary = quantize_checkpoint("runs/nano-teacher/model", "models/nano-int4", tier)

Tensors are read, quantised and written one transformers parameter at a time, at offsets planned from the
headers alone: memory stays at a few copies of the largest parameter. Unlike mlx-lm this also reads the
per-expert names and the flat config of `save_pretrained`, and needs no mlx.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.families import Family, Names
from edge0_runtime.contract.files import raise_problems, read_json
from edge0_runtime.contract.links import Link
from edge0_runtime.contract.tier import Tier
from edge0_train.base.layout import Target, cast_dtype, link_targets, quantization_block
from edge0_train.base.links import from_part, to_mlx
from edge0_train.base.load import empty_model, parameter_shapes
from edge0_train.base.names import is_quantised, mlx_config
from edge0_train.base.shards import SHARD_BYTES, Group, check_new, new_directory, write_json, write_shards
from edge0_train.base.weights import FLOATS, TORCH_DTYPES, read_tensor

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
            yield from_part(self.link, torch.stack(tensors) if self.link.per_expert else tensors[0])
        if not self.parts:
            yield from to_mlx(self.link, read_tensor(*source.entries[self.whole]), self.config)

    def group(self, source: Checkpoint) -> Group:
        """What it writes."""

        def make() -> Iterator[tuple[str, torch.Tensor]]:
            for target, tensor in zip(self.targets, self.tensors(source), strict=True):
                yield from target.make(tensor.to(target.dtype)).items()

        return Group({name: kind for target in self.targets for name, kind in target.stored().items()}, make)


def quantize_checkpoint(
    source_dir: Path | str,
    out_dir: Path | str,
    tier: Tier,
    *,
    names: Names = "mlx",
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, Any]:
    """Write the int4 MLX directory of a transformers model; `out_dir` appears whole or not at all.

    Args:
        source_dir: config.json, safetensors, tokenizer; nested or flat config, fused or per-expert tensors.
        names: mlx-lm's names, or those of the published file, which the public runtime reads; the values are the same.
        shard_bytes: more tensor bytes are split into several files (between parameters) with an index, unless the names are
            the published ones and the public runtime reads one file alone.

    Returns:
        What was done: dtype, modules per code width, tensors, bytes, shards, dropped tensors, copied files.

    Raises:
        Edge0Error: `out_dir` exists, the source is not the tier's model, is quantised already or incomplete,
            or no room.
    """
    out_dir = Path(out_dir)
    check_new(out_dir)
    layout = tier.layout
    source = Checkpoint.open(source_dir)
    source.check_architecture(tier)
    if is_quantised(source.config):
        raise Edge0Error(
            f"{source.directory}: its config.json says that it is quantised, and quantising again would change "
            "its values; start from the model in bfloat16 or float32"
        )
    if not (source.directory / "tokenizer.json").is_file():
        raise Edge0Error(f"{source.directory}: has no tokenizer.json; save the tokenizer beside the model")
    config = _deployed_config(source, layout)
    jobs, dropped = _plan(source, config, layout, names)
    targets = [target for job in jobs for target in job.targets]
    config["quantization"] = config["quantization_config"] = quantization_block(targets)

    groups = [job.group(source) for job in jobs]
    total = sum(group.nbytes() for group in groups)
    with new_directory(out_dir, total) as partial:
        one_file = layout.one_file and names == "published"
        shards = write_shards(partial, groups, total if one_file else shard_bytes)
        write_json(partial / "config.json", dict(sorted(config.items())))
        copied = [name for name in COPIED if (source.directory / name).is_file()]
        for name in copied:
            shutil.copyfile(source.directory / name, partial / name)
    modules = Counter(target.bits for target in targets)
    return {
        "names": names,
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


def check_tensors(source: Checkpoint, layout: Family) -> None:
    """Raise one Edge0Error listing every tensor of a transformers directory that is missing, left over or of a wrong form.

    Compared are headers and config.json; no tensor is read.
    """
    _plan(source, mlx_config(layout, source.config), layout, "mlx")


def _deployed_config(source: Checkpoint, layout: Family) -> dict[str, Any]:
    """config.json for mlx-lm and transformers; as mlx-lm does, with generation_config.json's end tokens."""
    config = mlx_config(layout, source.config)
    path = source.directory / "generation_config.json"
    if path.is_file():
        generation = read_json(path, "copy it from the original model again")
        if generation.get("eos_token_id") is not None:
            config["eos_token_id"] = generation["eos_token_id"]
    return config


def _plan(source: Checkpoint, config: Mapping[str, Any], layout: Family, names: Names) -> tuple[list[Job], int]:
    """What each transformers parameter becomes, in the model's order, and how many tensors are dropped.

    Raises Edge0Error listing every tensor that is missing, left over, or of a wrong shape or dtype.
    """
    text_config = config.get("text_config", config)
    cast = cast_dtype(config)
    shapes = parameter_shapes(empty_model(text_config, layout, torch.float32))
    wanted = [name for name in source.entries if not layout.is_dropped(name, text_config)]
    on_disk = {layout.hf_name(name): name for name in wanted}
    left_over = set(on_disk)
    jobs: list[Job] = []
    problems = [
        f"{name}: the same parameter as {on_disk[layout.hf_name(name)]}"
        for name in wanted
        if on_disk[layout.hf_name(name)] != name
    ]
    for hf_name, shape in shapes.items():
        link = layout.written_link(hf_name, text_config, names)
        if link is None:
            problems.append(f"{hf_name}: a parameter of the transformers model without a row in its name table")
            continue
        made = to_mlx(link, torch.empty(shape, device="meta"), text_config)
        pieces = {hf_name: tuple(shape)}
        parts: tuple[tuple[str, ...], ...] = ()
        if link.disk and hf_name not in on_disk:
            count = shape[0] if link.per_expert else 1
            parts = tuple(tuple(name.replace("{e}", str(e)) for e in range(count)) for name in link.disk)
            on_part = [tuple(from_part(link, tensor).shape)[link.per_expert :] for tensor in made]
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
                link_targets(link, [tuple(tensor.shape) for tensor in made], dtype),
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
