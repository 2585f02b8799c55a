"""What an error of the real phases advises is done here, and helps."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path

import pytest

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.cli import run_phase
from edge0_train.config import Config, configure
from edge0_train.data.rows import read_data
from edge0_train.run import is_unused
from tests.train.conftest import Make
from tests.train.test_teacher_text import SMALL, FakeVllm

# -- rows of text ------------------------------------------------------------------------------------------------------


@pytest.fixture
def written(make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A finished teacher_text."""
    monkeypatch.setitem(sys.modules, "vllm", FakeVllm())
    config = make_config("teacher_text", f"run_dir={tmp_path / 'run'}", *SMALL, "sample.backend=vllm")
    run_phase(config)
    return config


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("card.json", ""),
        ("card.json", "{}"),
        ("card.json", None),
        ("train.jsonl", "{}\n"),
        ("held_out.jsonl", None),
        ("train.jsonl", '{"prompt_ids": [1], "completion_ids": [2], "finish_reason": "stop"}\n'),
    ],
)
def test_damaged_text_is_written_again_from_its_shards(written, name, content):
    directory = Path(written.run_dir)
    file = directory / name
    before = {path.name: path.read_bytes() for path in directory.glob("*.json*")}
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(Edge0Error) as error:
        read_data(directory, 64)
    assert str(directory) in str(error.value) and len(str(error.value)) < 1000
    if name != "held_out.jsonl":
        assert "delete done.json of that run and continue it with resume=true" in str(error.value)
    if "delete the file" in str(error.value):
        file.unlink()
    (directory / "done.json").unlink()
    run_phase(dataclasses.replace(written, resume=True))
    assert read_data(directory, 64)[0].train
    assert {
        name: (directory / name).read_bytes() for name in before if name not in ("done.json", "environment.json")
    } == {name: data for name, data in before.items() if name not in ("done.json", "environment.json")}


# -- the base ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def quantised(tmp_path: Path) -> Config:
    config = configure("phase=quantize", f"root={tmp_path / 'root'}")
    run_phase(config)
    return config


def test_quantising_goes_on_where_only_its_done_json_is_missing(quantised):
    """Killed between the directory's appearance and the end of the run."""
    base, done = Path(quantised.base.directory), Path(quantised.run_dir) / "done.json"
    written = {path.name: path.read_bytes() for path in base.iterdir()}
    done.unlink()
    (base.with_name(".base.123-0123abcd.tmp")).mkdir()
    (Path(quantised.run_dir) / ".done.json.123-0123abcd.tmp").write_text("{")
    run_phase(dataclasses.replace(quantised, resume=True))
    assert done.exists() and {path.name: path.read_bytes() for path in base.iterdir()} == written
    assert not [path for path in base.parent.rglob(".*")]


def test_another_base_in_the_place_of_the_own_is_refused_and_deleting_it_helps(quantised):
    base, done = Path(quantised.base.directory), Path(quantised.run_dir) / "done.json"
    done.unlink()
    weights = base / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(Edge0Error, match=r"base\.directory: .* exists and is not what .* makes; delete it"):
        run_phase(dataclasses.replace(quantised, resume=True))
    shutil.rmtree(base)
    run_phase(dataclasses.replace(quantised, resume=True))
    assert done.exists() and base.is_dir()


def test_a_base_that_is_there_does_not_leave_a_run_behind(quantised, tmp_path):
    other = dataclasses.replace(quantised, run_dir=str(tmp_path / "other"))
    with pytest.raises(Edge0Error, match="exists; delete it or name another one"):
        run_phase(other)
    assert not Path(other.run_dir).exists()
    run_phase(dataclasses.replace(other, base=dataclasses.replace(other.base, directory=str(tmp_path / "base2"))))
    assert not is_unused(Path(other.run_dir)) and (tmp_path / "base2").is_dir()
