"""scripts/fetch_models.py against a hub that lies in a folder: resumed, verified, clear when it does not answer."""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import builtin_tier
from edge0_train.synthetic import write_adapters, write_base
from tests.scripts_by_path import load_script

script = load_script("fetch_models")
SOURCE = script.Source("owner/nano", "0" * 40)


class FolderHub:
    """The two calls that the script makes; `broken` files arrive with a flipped byte, `room` files arrive in a try."""

    def __init__(self, directory: Path, broken: str = "", room: int = 99) -> None:
        self.directory, self.broken, self.room = directory, broken, room
        self.sent: list[str] = []

    def model_info(self, repo_id: str, *, revision: str, files_metadata: bool) -> Any:
        assert (repo_id, revision, files_metadata) == (SOURCE.repo, SOURCE.revision, True)
        siblings = []
        for path in sorted(self.directory.iterdir()):
            data = path.read_bytes()
            lfs = SimpleNamespace(sha256=hashlib.sha256(data).hexdigest()) if path.suffix == ".safetensors" else None
            siblings.append(SimpleNamespace(rfilename=path.name, size=len(data), lfs=lfs))
        return SimpleNamespace(siblings=siblings)

    def snapshot_download(self, repo_id: str, *, revision: str, local_dir: str, allow_patterns: list[str]) -> None:
        assert (repo_id, revision) == (SOURCE.repo, SOURCE.revision)
        for name in allow_patterns:
            target = Path(local_dir) / name
            if target.exists():
                continue
            if len(self.sent) == self.room:
                raise httpx.ConnectError("connection lost")
            data = bytearray((self.directory / name).read_bytes())
            if name == self.broken:
                data[-1] ^= 1
            target.write_bytes(data)
            self.sent.append(name)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hub") / "nano"
    write_base(directory, builtin_tier("nano"))
    write_adapters(directory, builtin_tier("nano"), 1.0)
    (directory / "modeling.py").write_text("raise SystemExit")
    return directory


def test_everything_but_code_arrives_and_is_checked(published, tmp_path):
    hub = FolderHub(published)
    files = script.fetch(SOURCE, tmp_path / "m", hub, "nano")
    assert {file.name for file in files} == {path.name for path in published.iterdir()} - {"modeling.py"}
    assert all((tmp_path / "m" / f.name).read_bytes() == (published / f.name).read_bytes() for f in files)


def test_a_second_try_fetches_only_what_is_missing(published, tmp_path):
    with pytest.raises(
        Edge0Error, match=r"owner/nano: .* did not answer \(connection lost\).*what has arrived is kept"
    ):
        script.fetch(SOURCE, tmp_path, FolderHub(published, room=3), "nano")
    again = FolderHub(published)
    files = script.fetch(SOURCE, tmp_path, again, "nano")
    assert len(again.sent) == len(files) - 3


def test_a_damaged_file_is_named(published, tmp_path):
    with pytest.raises(
        Edge0Error, match=r"(?s)not what was published.*model\.safetensors: sha256 [0-9a-f]{64}, the .*delete"
    ):
        script.fetch(SOURCE, tmp_path, FolderHub(published, broken="model.safetensors"), "nano")
    (tmp_path / "model.safetensors").unlink()
    script.fetch(SOURCE, tmp_path, FolderHub(published), "nano")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Edge0Error, match=r"config\.json: 2 bytes, the repository has \d+"):
        script.fetch(SOURCE, tmp_path, FolderHub(published), "nano")


def test_another_model_than_the_tiers_is_refused(published, tmp_path):
    with pytest.raises(Edge0Error, match="not the base of tier 35b"):
        script.fetch(SOURCE, tmp_path / "a", FolderHub(published), "35b")
    alone = tmp_path / "alone"
    shutil.copytree(published, alone)
    (alone / "lora_edge0_nano.safetensors").unlink()
    with pytest.raises(Edge0Error, match="has no lora file of tier nano"):
        script.fetch(SOURCE, tmp_path / "b", FolderHub(alone), "nano")


def test_a_branch_is_not_a_revision(tmp_path):
    with pytest.raises(Edge0Error, match=r"revision: 'main' is not a commit of 40 hexadecimal digits"):
        script.fetch(script.Source("owner/nano", "main"), tmp_path, FolderHub(tmp_path))


def test_offline_is_said_in_one_sentence(tmp_path):
    class Offline(FolderHub):
        def model_info(self, *_: Any, **__: Any) -> Any:
            raise OfflineModeIsEnabled("offline mode is enabled")

    with pytest.raises(
        Edge0Error, match=r"did not answer \(offline mode is enabled\); check the network, HF_HUB_OFFLINE"
    ):
        script.fetch(SOURCE, tmp_path, Offline(tmp_path))


def test_the_command_says_what_it_takes(monkeypatch, tmp_path, capsys):
    """With the exit code of everything that the user can act on; Ctrl-C in a download is one sentence too."""

    def ends_with(code: int, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["x", *words])
        with pytest.raises(SystemExit) as stop:
            script.main()
        assert stop.value.code == code
        return capsys.readouterr().err

    assert ends_with(2, "70b", str(tmp_path)).startswith(
        "error: '70b': choose one of 35b, 8b, teacher-35b, teacher-8b, or give owner/name with --revision"
    )
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: FolderHub(tmp_path))
    for error, code, said in (
        (OSError("no route to host"), 2, "no route to host"),
        (KeyboardInterrupt(), 130, "stopped"),
    ):
        monkeypatch.setattr(FolderHub, "model_info", lambda *_, e=error, **__: (_ for _ in ()).throw(e))
        assert said in ends_with(code, "35b", str(tmp_path / "m"))
    assert not list(tmp_path.iterdir())
