"""Of a repository on the Hub only headers are read: huggingface_hub's own client against a server on this machine."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.measure import doctor as doctor_module
from edge0_runtime.measure import hub
from edge0_runtime.measure.doctor import doctor
from edge0_runtime.measure.hub import outline_of_hub

SHA = "0" * 40


class Hub(BaseHTTPRequestHandler):
    """The two endpoints that are asked; `ranges` False answers with whole files."""

    directory: Path
    served: list[tuple[str, int]]
    ranges = True

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/tiny") and not path.endswith("/missing"):
            files = [{"rfilename": file.name, "size": file.stat().st_size} for file in sorted(self.directory.iterdir())]
            self._answer(200, json.dumps({"id": "org/tiny", "sha": SHA, "siblings": files}).encode())
        elif found := re.fullmatch(rf"/org/tiny/resolve/{SHA}/([\w.-]+)", path):
            data = (self.directory / found[1]).read_bytes()
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
            if asked and self.ranges:
                data = data[int(asked[1]) : int(asked[2]) + 1]
            self.served.append((found[1], len(data)))
            self._answer(206 if self.ranges else 200, data)
        else:
            code = "RevisionNotFound" if path.endswith("/missing") else "RepoNotFound"
            self._answer(404, b"{}", code)

    def _answer(self, status: int, body: bytes, error: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if error is not None:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def served(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """`tiny_dir` as org/tiny; what was sent of which file."""
    Hub.directory, Hub.served, Hub.ranges = tiny_dir, [], True
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(doctor_module, "step_seconds", lambda checkpoint, tier: 0.5)
    yield Hub.served
    server.shutdown()
    server.server_close()


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


def test_a_server_that_would_send_whole_files_is_refused(served: list[tuple[str, int]], tmp_path: Path) -> None:
    Hub.ranges = False
    with pytest.raises(Edge0Error, match=r"org/tiny/config\.json: the server sends no ranges; download the model"):
        outline_of_hub("org/tiny", None, tmp_path)


def test_a_hub_that_is_not_there_is_a_sentence(
    served: list[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # discard: nobody listens
    with pytest.raises(Edge0Error, match=r"the Hub can't be asked: .*; try again, or give a directory"):
        outline_of_hub("org/tiny", None, tmp_path)
