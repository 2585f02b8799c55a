"""Raw files crafted by hand, and a complete set of nano artifacts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge0_runtime.contract import PhaseRecord, Provenance, Teacher, Tier, builtin_tier, read_adapter, write_adapter
from tests.contract.adapters import CONFIG

SHA = {name: digit * 64 for name, digit in zip(("base", "tokenizer", "template", "other"), "abcd", strict=True)}


@pytest.fixture
def craft(tmp_path: Path) -> Callable[..., Path]:
    """craft(header, data, name) writes a file byte by byte; `header` is JSON data, or the header's exact text."""

    def make(header: Any, data: bytes = b"", name: str = "model.safetensors") -> Path:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path = tmp_path / name
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        return path

    return make


@pytest.fixture
def nano() -> Tier:
    return builtin_tier("nano")


@pytest.fixture
def provenance() -> Callable[..., Provenance]:
    """provenance(field=value...): a complete record; fields given replace its own."""

    def make(**fields: Any) -> Provenance:
        phase = PhaseRecord(
            phase="head_distill",
            run_id="r1",
            parents={"base": SHA["base"]},
            seed=0,
            steps=600,
            tokens=307200,
            rows=4800,
            metrics={"recall_at_k": 0.65},
            time="2026-01-02T03:04:05+00:00",
        )
        record: dict[str, Any] = {
            "tool_version": "0.1.0",
            "commit": "deadbeef+dirty",
            "phases": (phase,),
            "base_fingerprint": SHA["base"],
            "tokenizer_hash": SHA["tokenizer"],
            "template_hash": SHA["template"],
            "teacher": Teacher(id="nano-teacher", revision="1"),
            "data": None,
            "prerouter_sha256": None,
            "created": "2026-01-02T03:04:05Z",
            "base_config": CONFIG,
        }
        return Provenance(**(record | fields))

    return make


@pytest.fixture
def tensors(nano: Tier) -> Callable[[str], dict[str, np.ndarray]]:
    """tensors(kind): random float32 tensors of the nano tier, the same at every call."""

    def make(kind: str) -> dict[str, np.ndarray]:
        random = np.random.default_rng(0)
        shapes = nano.head_tensors() if kind == "prerouter" else nano.lora_tensors()
        return {key: random.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}

    return make


@pytest.fixture
def written(tmp_path, nano, tensors, provenance):
    """written(kind) writes a good adapter of the nano tier and returns its path."""

    def make(kind: str, tier: Tier = nano, **fields) -> Path:
        path = tmp_path / tier.file_name(kind)
        write_adapter(path, kind, tier, tensors(kind), provenance(**fields))
        return path

    return make


@pytest.fixture
def pair(written):
    """A prerouter and a LoRA made together."""
    prerouter = read_adapter(written("prerouter"), "prerouter")
    return prerouter, read_adapter(written("lora", prerouter_sha256=prerouter.sha256), "lora")
