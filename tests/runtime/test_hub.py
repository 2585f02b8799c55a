"""Of a repository on the Hub only headers are read: huggingface_hub's own client against a server on this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.measure import doctor as doctor_module
from edge0_runtime.measure import hub
from edge0_runtime.measure.doctor import doctor
from edge0_runtime.measure.hub import outline_of_hub
from tests.runtime.hub_server import Hub, served_hub


@pytest.fixture
def served(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """`tiny_dir` as org/tiny; what was sent of which file."""
    monkeypatch.setattr(doctor_module, "step_seconds", lambda checkpoint, tier: 0.5)
    with served_hub(tiny_dir, monkeypatch) as found:
        yield found.served


@pytest.mark.parametrize("first_bytes", [2**17, 100])
def test_headers_alone_tell_what_the_directory_would(
    served: list[tuple[str, int]], tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_bytes: int
) -> None:
    monkeypatch.setattr(hub, "FIRST_BYTES", first_bytes)  # a header in one request, or in two
    outline_of_hub("org/tiny", None, tmp_path)
    here, there = Checkpoint.open(tiny_dir), Checkpoint.open(tmp_path)
    assert {name: entry for name, (_, entry) in there.entries.items()} == {
        name: entry for name, (_, entry) in here.entries.items()
    }
    assert there.config == here.config
    if first_bytes == 100:
        for file in tiny_dir.glob("*.safetensors"):
            header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
            if file.name.startswith(("model", "prerouter", "lora")):
                assert sum(size for name, size in served if name == file.name) == header


def test_doctor_takes_a_repository(served: list[tuple[str, int]], tiny_dir: Path) -> None:
    asked = {"memory_bytes": 2**30, "disk_bytes_per_second": 1e7}
    by_id, by_directory = doctor("org/tiny@main", **asked), doctor(str(tiny_dir), **asked)
    assert by_id["source"] == "hub" and by_id["tier"] == "tiny"  # named by its adapters' headers
    assert by_id["budgets"] == by_directory["budgets"]


def test_doctor_takes_adapters_beside_a_base(
    served: list[tuple[str, int]], base_dir: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    asked = {"memory_bytes": 2**30, "disk_bytes_per_second": 1e7}
    wanted = doctor(str(tiny_dir), **asked)
    for adapters in ("org/tiny@main", str(tiny_dir)):
        found = doctor(str(base_dir), adapters=adapters, **asked)
        assert found["tier"] == "tiny" and found["budgets"] == wanted["budgets"]
    with pytest.raises(Edge0Error, match="no adapter file of a tier is there"):
        doctor(str(base_dir), adapters=str(tmp_path))
    with pytest.raises(Edge0Error, match="adapters: nano is a tier and names none; leave out --adapters"):
        doctor("nano", adapters=str(tiny_dir))


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("org/other", "org/other: no such directory or tier, and not on the Hub or private"),
        ("org/tiny@missing", "org/tiny@missing: the Hub has no such revision; leave out @missing"),
    ],
)
def test_what_the_hub_does_not_have_is_a_sentence(served: list[tuple[str, int]], what: str, sentence: str) -> None:
    with pytest.raises(Edge0Error, match=re.escape(sentence)):
        doctor(what)


def test_a_server_that_would_send_whole_files_is_refused(
    served: list[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hub, "ranges", False)
    with pytest.raises(Edge0Error, match=r"org/tiny/config\.json: the server sends no ranges; download the model"):
        outline_of_hub("org/tiny", None, tmp_path)


def test_a_hub_that_is_not_there_is_a_sentence(
    served: list[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # discard: nobody listens
    with pytest.raises(Edge0Error, match=r"the Hub can't be asked: .*; try again, or give a directory"):
        outline_of_hub("org/tiny", None, tmp_path)
