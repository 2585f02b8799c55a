"""The public project's own directory, at full size and in its own form. Its data is a hole.

Its adapters have no contract; some releases carry flat metadata of their converter, as third parties report of revision 1ff9f447.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from edge0_runtime.cli import main
from edge0_runtime.contract.artifacts import find_adapter
from edge0_runtime.contract.tier import builtin_tier
from edge0_runtime.inspection import inspect
from edge0_train.synthetic import write_base

TIER = builtin_tier("35b")
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


@pytest.fixture(scope="module", params=[False, True], ids=["no metadata", "flat metadata"])
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("published") / "edge0-35b"
    write_base(directory, TIER, headers_only=True)
    for kind, shapes in (("prerouter", TIER.head_tensors()), ("lora", TIER.lora_tensors())):
        write_hole(directory / f"{kind}_edge0_35b.safetensors", shapes, metadata=FLAT[kind] if request.param else None)
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
