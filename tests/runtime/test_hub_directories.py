"""A model directory by its Hub id: fetched once and no more than it needs, gone on with, and found again without a network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from edge0_runtime.cli import main
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.hub import adapters_of, directory_of
from tests.runtime.hub_server import SHA, Hub, served_hub

GENERATE = ("--prompt-ids", "5,6,7", "--max-tokens", "4", "--json")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a working directory in which no model lies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def repository(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_dir`, with what a stranger's repository has beside it."""
    directory = tmp_path_factory.mktemp("repository") / "files"
    directory.mkdir()
    for file in tiny_dir.iterdir():
        (directory / file.name).symlink_to(file)
    for name in ("modeling_tiny.py", "pytorch_model.bin", "README.md"):
        (directory / name).write_text("import os")
    return directory


@pytest.fixture
def hub(cache: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    with served_hub(repository, monkeypatch) as found:
        yield found


def test_what_serving_needs_is_fetched_once_and_found_again_offline(hub, cache, tiny_dir, monkeypatch, capsys, caplog):
    assert main(["generate", "org/tiny@main", *GENERATE]) == 0
    out, _ = capsys.readouterr()
    assert f"org/tiny@main: revision {SHA}, in {cache}" in caplog.text
    assert {name for name, _ in hub.served} == {file.name for file in tiny_dir.iterdir()}
    hub.served.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("org/tiny@main", f"org/tiny@{SHA}", "org/tiny"):
        assert main(["generate", name, *GENERATE]) == 0
        assert json.loads(capsys.readouterr().out)["ids"] == json.loads(out)["ids"]
    assert main(["inspect", "org/tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []
    assert not hub.served


def test_what_was_interrupted_goes_on_where_it_stopped(hub, cache, tiny_dir, monkeypatch):
    size = (tiny_dir / "model.safetensors").stat().st_size
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr(hub, "breaks_at", size - 1000)
    directory = directory_of("org/tiny")
    sent = [count for name, count in hub.served if name == "model.safetensors"]
    assert sent[0] == size and 1000 <= sent[1] < 2000, "the second time the rest alone"
    assert (directory / "model.safetensors").read_bytes() == (tiny_dir / "model.safetensors").read_bytes()


def test_a_part_of_a_repository_is_named_as_one_offline(hub, monkeypatch):
    adapters_of("org/tiny")
    assert {name.split("_")[0] for name, _ in hub.served} == {"prerouter", "lora"}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Edge0Error, match=r"org/tiny: only a part of it has been fetched.*it goes on where it stopped"):
        directory_of("org/tiny")


def test_adapters_of_a_repository_serve_beside_a_base(hub, base_dir, tiny_dir, capsys):
    assert main(["generate", str(base_dir), "--adapters", "org/tiny@main", *GENERATE]) == 0
    beside = json.loads(capsys.readouterr().out)["ids"]
    assert main(["generate", str(tiny_dir), *GENERATE]) == 0
    assert json.loads(capsys.readouterr().out)["ids"] == beside


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("org/other", "org/other: not a directory here, and not on the Hub or private; correct it"),
        ("org/tiny@missing", "org/tiny@missing: the Hub has no such revision; leave out @missing for the newest"),
        ("./org/tiny", "org/tiny: not a directory; give the directory that holds config.json"),
        ("/org/tiny", "/org/tiny: not a directory"),
    ],
)
def test_what_is_not_there_is_a_sentence(hub, capsys, name, sentence):
    assert main(["generate", name, *GENERATE]) == 2
    assert f"error: {sentence}" in capsys.readouterr().err


def test_a_directory_of_that_name_wins(hub, tiny_dir):
    Path("org").mkdir()
    Path("org/tiny").symlink_to(tiny_dir)
    assert directory_of("org/tiny") == adapters_of("org/tiny") == Path("org/tiny")
    assert not hub.served


def test_offline_an_unknown_name_says_where_it_was_looked_for(cache, capsys):
    assert main(["chat", "org/tiny@main"]) == 2
    err = capsys.readouterr().err
    assert err == (
        f"error: org/tiny@main: not a directory here, not in the Hub's cache ({cache}), and HF_HUB_OFFLINE is set;"
        " fetch it online, or give a directory\n"
    )


def test_a_hub_that_cannot_be_reached_is_a_sentence(cache, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # discard: nobody listens
    with pytest.raises(Edge0Error, match=r"and the Hub can't be reached; fetch it online, or give a directory"):
        directory_of("org/tiny")
