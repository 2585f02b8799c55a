"""The public project's own directory, at full size and in its own form. Its data is a hole.

Its adapters have no contract; some releases carry flat metadata of their converter, as third parties report of revision 1ff9f447.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from edge0_runtime.cli import main
from edge0_runtime.contract.artifacts import find_adapter
from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.families import Names
from edge0_runtime.contract.public_runtime import upstream_base_problems
from edge0_runtime.contract.tier import Tier, builtin_tier
from edge0_runtime.inspection import inspect
from edge0_train.synthetic import write_base

TIER, LING = builtin_tier("35b"), builtin_tier("8b")
CONVERTED = {
    "source": "round9.npz",
    "source_md5": "0" * 32,
    "converted": "2026-09-08T09:59:20+00:00",
    "format_version": "1",
}
FLAT = {
    "prerouter": {"kind": "prerouter", "model": "edge0-35b", "owners": json.dumps([*range(6, 39)]), **CONVERTED},
    "lora": {"kind": "lora", "model": "edge0-35b", "K": "4", "r": "16", "alpha": "32", **CONVERTED},
}


def write_hole(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str = "F16", metadata: Any = None) -> None:
    """A safetensors file of zeros that takes no room; without `metadata` it has no such key at all."""
    header, end = {"__metadata__": metadata} if metadata else {}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * {"F16": 2, "F32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def write_holes(directory: Path, tier: Tier, metadata: Mapping[str, Any], names: Names = "published") -> Path:
    """A base and both adapters at full size, under the names of the published files."""
    write_base(directory, tier, names=names, headers_only=True)
    for kind, shapes in (("prerouter", tier.head_tensors()), ("lora", tier.lora_tensors())):
        write_hole(directory / tier.file_name(kind), shapes, metadata=metadata.get(kind))
    return directory


@pytest.fixture(scope="module", params=[False, True], ids=["no metadata", "flat metadata"])
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_holes(tmp_path_factory.mktemp("published") / "edge0-35b", TIER, FLAT if request.param else {})


def test_the_published_pair_is_served_by_the_built_in_tier(published):
    heads, lora = (find_adapter(published, kind) for kind in ("prerouter", "lora"))
    assert heads and lora and heads.tier == lora.tier == TIER and not heads.has_contract and not lora.has_contract
    assert len(heads.tensors) == 3 * 33 and len(lora.tensors) == 620


def test_inspect_says_what_it_is_and_what_cannot_be_known(published, capsys):
    data = inspect(published)
    assert data["base"]["payload_bytes"] == 19_508_787_456 and data["base"]["expert_bytes"] == 18_119_393_280
    assert (data["prerouter"]["payload_bytes"], data["lora"]["payload_bytes"]) == (138_412_032, 42_332_160)
    assert (data["prerouter"]["k"], data["prerouter"]["feature_topk"]) == (4, "executed")
    assert [data[part]["upstream_problems"] for part in ("base", "prerouter", "lora")] == [[], [], []]
    assert data["problems"] == [] and data["base"]["names"] == "mlx and published"
    assert main(["inspect", str(published)]) == 0
    text = capsys.readouterr().out
    assert text.count("contract: none; built-in tier 35b") == 2 and text.count("loads upstream: yes") == 3
    assert "belong together: unknown" in text and text.count("binding to the base cannot be checked") == 2


def test_a_pair_that_upstream_cannot_read_is_said(published, tmp_path):
    for path in published.iterdir():
        (tmp_path / path.name).symlink_to(path)
    path = tmp_path / "lora_edge0_35b.safetensors"
    path.unlink()
    write_hole(path, TIER.lora_tensors(), dtype="F32")
    assert inspect(tmp_path)["lora"]["upstream_problems"] == ["tensors are float32; it serves F16 and cannot read BF16"]


def test_the_8b_in_published_names_is_one_file_of_the_published_tensors(tmp_path, capsys):
    """tiers: experts below mlp.experts in layers 1..23, kv_b_proj whole, one model.safetensors."""
    directory = write_holes(tmp_path / "edge0-8b", LING, {})
    data = inspect(directory)
    assert [data[part]["upstream_problems"] for part in ("base", "prerouter", "lora")] == [[], [], []]
    assert data["base"]["names"] == "published" and data["base"]["shards"] == ["model.safetensors"]
    assert data["base"]["expert_bytes"] == 3_906_994_176
    entries = Checkpoint.open(directory).entries
    assert entries["model.layers.1.mlp.experts.gate_proj.weight"][1].shape == (128, 512, 192)
    assert entries["model.layers.3.attention.kv_b_proj.weight"][1].shape == (4096, 512)
    assert not any("switch_mlp" in name or "embed_q" in name or "unembed_out" in name for name in entries)
    assert main(["inspect", str(directory)]) == 0
    assert capsys.readouterr().out.count("loads upstream: yes") == 3


def test_the_8b_in_mlx_lms_names_is_said_not_to_be_readable_there_and_how_it_is_written(tmp_path, capsys):
    directory = write_holes(tmp_path / "edge0-8b", LING, {}, names="mlx")
    missing, absorbed = inspect(directory)["base"]["upstream_problems"]
    assert "model.layers.1.mlp.experts.gate_proj.weight is missing, where it stops" in missing
    assert "kv_b_proj is absorbed into embed_q and unembed_out" in absorbed
    assert all("phase=quantize" in reason and "base.names=published" in reason for reason in (missing, absorbed))
    assert main(["inspect", str(directory)]) == 0
    text = capsys.readouterr().out
    assert "names: mlx\n" in text and text.count("not loadable upstream") == 2


@pytest.mark.parametrize(
    ("entries", "config", "reason"),
    [
        (lambda entries: {n: e for n, e in entries.items() if n != "language_model.lm_head.weight"}, {}, "lm_head.weight"),
        (dict, {"text_config": {"tie_word_embeddings": True}}, "the output head is the embedding (tie_word_embeddings)"),
        (dict, {"quantization": {"bits": 8, "group_size": 64}}, "quantization is 8 bits in groups of 64; it has 4 and 64"),
    ],
)  # fmt: skip
def test_a_base_that_upstream_would_not_read_is_said(published, entries, config, reason):
    whole = Checkpoint.open(published)
    text = whole.config["text_config"] | config.get("text_config", {})
    other = Checkpoint(published, whole.config | config | {"text_config": text}, entries(whole.entries))
    (problem,) = upstream_base_problems(other, TIER)
    assert reason in problem


def test_a_sharded_8b_and_other_scales_than_bf16_are_said(tmp_path):
    write_base(tmp_path / "edge0-8b", LING, names="published", headers_only=True)
    (tmp_path / "edge0-8b/model.safetensors").rename(tmp_path / "edge0-8b/model-00001-of-00001.safetensors")
    whole = Checkpoint.open(tmp_path / "edge0-8b")
    (problem,) = upstream_base_problems(whole, LING)
    assert problem == "the base lies in model-00001-of-00001.safetensors; it reads model.safetensors alone"
    name = "model.layers.9.mlp.experts.up_proj.scales"
    header, entry = whole.entries[name]
    other = Checkpoint(
        whole.directory, whole.config, whole.entries | {name: (header, dataclasses.replace(entry, dtype="F16"))}
    )
    assert any("scales of the experts are BF16, F16" in problem for problem in upstream_base_problems(other, LING))
