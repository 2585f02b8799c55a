"""transformers' list of its modules is scanned once for all processes, and is the same list however it came."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import import_utils

from edge0_runtime import scanning

IMPORT = """
import hashlib, json, sys
read = []
sys.addaudithook(lambda event, of: read.append(of[0]) if event == "open" and "models" in str(of[0]) else None)
import edge0_runtime.libraries
import transformers, transformers.models
both = (transformers, transformers.models)
names = json.dumps([[sorted(module.__all__), sorted(module._class_to_module.items())] for module in both])
sources = [name for name in read if str(name).endswith(".py") and "/modeling_" in str(name)]
print(json.dumps([hashlib.sha256(names.encode()).hexdigest(), len(sources)]))
"""


def imported(cache: Path) -> list[Any]:
    """[what both lists say, how many models' source files were read] of a new process."""
    command = [sys.executable, "-c", IMPORT]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    return list(json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout))


def test_the_first_process_keeps_what_the_next_one_finds(tmp_path):
    nowhere = tmp_path / "file"
    nowhere.touch()  # a cache directory cannot be made below it
    scanned, many = imported(nowhere)
    made, as_many = imported(tmp_path)
    kept, few = imported(tmp_path)
    assert scanned == made == kept
    assert many == as_many > 300, "one scan instead of transformers' two"
    assert few < 10


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Path(import_utils.__file__).parents[1] / "models"


def test_a_list_comes_back_from_its_file_as_it_was(models):
    structure = inspect.unwrap(getattr(import_utils, scanning.SCAN))(models)
    assert scanning._kept(models) is None
    assert scanning._written(structure, models) is structure
    assert scanning._kept(models) == structure
    file = scanning.kept_at(models)
    for damage in (b"", b"[]", b"{}", b'{"folders": {}, "modules": [3]}', file.read_bytes()[:1000]):
        file.write_bytes(damage)
        assert scanning._kept(models) is None
