"""The public project's own directory, at full size and in its own form: no contract metadata. Its data is a hole."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from edge0_runtime.cli import main
from edge0_runtime.contract.artifacts import find_adapter
from edge0_runtime.contract.tier import builtin_tier
from edge0_runtime.inspection import inspect
from edge0_train.synthetic import write_base

TIER = builtin_tier("35b")


def write_hole(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str = "F16") -> None:
    """A safetensors file of zeros without `__metadata__`, that takes no room."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * {"F16": 2, "F32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("published") / "edge0-35b"
    write_base(directory, TIER, headers_only=True)
    write_hole(directory / "prerouter_edge0_35b.safetensors", TIER.head_tensors())
    write_hole(directory / "lora_edge0_35b.safetensors", TIER.lora_tensors())
    return directory


def test_the_published_pair_is_served_by_the_built_in_tier(published):
    heads, lora = (find_adapter(published, kind) for kind in ("prerouter", "lora"))
    assert heads and lora and heads.tier == lora.tier == TIER and not heads.has_contract and not lora.has_contract
    assert len(heads.tensors) == 3 * 33 and len(lora.tensors) == 620


def test_inspect_says_what_it_is_and_what_cannot_be_known(published, capsys):
    data = inspect(published)
    assert data["base"]["payload_bytes"] == 19_508_787_456 and data["base"]["expert_bytes"] == 18_119_393_280
    assert (data["prerouter"]["payload_bytes"], data["lora"]["payload_bytes"]) == (138_412_032, 42_332_160)
    assert (data["prerouter"]["k"], data["prerouter"]["feature_topk"]) == (4, "executed")
    assert data["prerouter"]["upstream_problems"] == data["lora"]["upstream_problems"] == data["problems"] == []
    assert main(["inspect", str(published)]) == 0
    text = capsys.readouterr().out
    assert text.count("contract: none; built-in tier 35b") == text.count("loads upstream: yes") == 2
    assert "belong together: unknown" in text and text.count("binding to the base cannot be checked") == 2


def test_a_pair_that_upstream_cannot_read_is_said(published, tmp_path):
    for path in published.iterdir():
        (tmp_path / path.name).symlink_to(path)
    path = tmp_path / "lora_edge0_35b.safetensors"
    path.unlink()
    write_hole(path, TIER.lora_tensors(), dtype="F32")
    assert inspect(tmp_path)["lora"]["upstream_problems"] == ["tensors are float32; it serves F16 and cannot read BF16"]
