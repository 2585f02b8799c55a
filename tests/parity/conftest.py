"""A tiny model in both forms."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge0_train.base import quantize_checkpoint
from tests.tiny_models import tiny_qwen3_5_moe, tiny_tier


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3_5_moe(tmp_path_factory.mktemp("tiny") / "hf")


@pytest.fixture(scope="module")
def int4(source: Path) -> Path:
    quantize_checkpoint(source, source.parent / "int4", tiny_tier())
    return source.parent / "int4"
