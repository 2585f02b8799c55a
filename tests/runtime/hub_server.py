"""A server on this machine that answers huggingface_hub's client as the Hub does, for one repository: a directory as org/tiny."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

SHA = "0" * 40


class Hub(BaseHTTPRequestHandler):
    """`ranges` False answers with whole files; `breaks_at` ends a connection after so many bytes of a file, once."""

    directory: Path
    served: list[tuple[str, int]]
    ranges = True
    breaks_at: int | None = None

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.endswith("/missing"):
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif re.fullmatch(r"/api/models/org/tiny(/revision/\w+)?", path):
            files = [{"rfilename": file.name, "size": file.stat().st_size} for file in self._files()]
            self._answer(200, json.dumps({"id": "org/tiny", "sha": SHA, "siblings": files}).encode())
        elif path == f"/api/models/org/tiny/tree/{SHA}":
            files = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "1" * 40}
                for file in self._files()
            ]
            self._answer(200, json.dumps(files).encode())
        elif found := re.fullmatch(rf"/org/tiny/resolve/{SHA}/([\w.-]+)", path):
            self._file(self.directory / found[1])
        else:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _files(self) -> list[Path]:
        return sorted(self.directory.iterdir())

    def _file(self, file: Path) -> None:
        data = file.read_bytes()
        headers = {"X-Repo-Commit": SHA, "ETag": f'"{hashlib.sha1(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        if asked and self.ranges:
            start, end = int(asked[1]), int(asked[2] or len(data) - 1) + 1
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
            data = data[start:end]
        if self.command == "GET":
            self.served.append((file.name, len(data)))
        self._answer(206 if asked and self.ranges else 200, data, headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.breaks_at is not None and len(body) > self.breaks_at and "X-Repo-Commit" in (headers or {}):
            body, type(self).breaks_at = body[: self.breaks_at], None
            self.close_connection = True
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def served_hub(directory: Path, patch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """`directory` as org/tiny; what was sent of which file is in `served`."""

    class Served(Hub):
        pass

    Served.directory, Served.served = directory, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Served)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "ENDPOINT", endpoint)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    yield Served
    server.shutdown()
    server.server_close()
