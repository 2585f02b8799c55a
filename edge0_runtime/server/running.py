"""From a bound address to a server that runs, and to its end.

The first SIGINT or SIGTERM lets running answers end, within GRACE_S: meanwhile connections are accepted and requests get 503.
What is not done then ends with an error. The second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import FrameType
from typing import TYPE_CHECKING, ClassVar

import uvicorn

from edge0_runtime.server.address import Address
from edge0_runtime.server.answer import RETRY_AFTER_S
from edge0_runtime.server.app import create_app
from edge0_runtime.server.connections import PatientProtocol
from edge0_runtime.server.errors import ApiError
from edge0_runtime.server.guard import Access
from edge0_runtime.server.service import Service
from edge0_runtime.server.settings import Settings

if TYPE_CHECKING:
    from edge0_runtime.engine import Engine

log = logging.getLogger("edge0_runtime.server")
GRACE_S = 30.0  # how long the first signal lets running answers go on
LAST_BYTES_S = 5  # then, how long their clients may take to read them


def serve(engines: Mapping[str, Engine], address: Address, settings: Settings, access: Access) -> None:
    """Run the app until a signal ends it; `access` is `Access.to` the address with these settings."""
    # uvicorn raises the signal again once it has shut down; unhandled, that kills Python before its cleanup.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    app = create_app(engines, address.host, settings, access)
    log.info("serving %s at %s/v1", ", ".join(engines), address.url)
    app.state.server = Server(app_config(app), app.state.service)
    app.state.server.run(sockets=address.sockets)


def app_config(app: object) -> uvicorn.Config:
    """uvicorn without log lines of its own form, since requests have theirs (requests.py)."""
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=PatientProtocol,
        log_config=None,
        access_log=False,
        server_header=False,
        reset_contextvars=True,
        timeout_graceful_shutdown=LAST_BYTES_S,
    )


class Server(uvicorn.Server):
    """uvicorn, which on a signal would refuse connections at once and cut answers after a while without a word."""

    def __init__(self, config: uvicorn.Config, service: Service, grace_s: float = GRACE_S) -> None:
        super().__init__(config)
        self._service, self._grace_s = service, grace_s
        self._until: float | None = None  # in `time.monotonic`, when what still runs is cut

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal has come."""
        if self._until is not None:
            os._exit(128 + sig)  # nothing of ours needs cleaning up, and any cleanup may hang
        self._captured_signals.append(sig)
        self._until = time.monotonic() + self._grace_s
        self._service.drain()
        log.info("ending: running answers have %g s; a second signal ends at once", self._grace_s)

    async def on_tick(self, counter: int) -> bool:
        """Every 0.1 s: whether to shut down."""
        if self._until is not None:
            late = time.monotonic() >= self._until
            if late:
                await asyncio.to_thread(self._service.close)
            self.should_exit = late or self._service.idle  # streams without an end look at it, too
        return await super().on_tick(counter)


@contextlib.contextmanager
def loading(address: Address) -> Iterator[None]:
    """Inside the block whoever connects is told that a model is being loaded: 503, and /health says `loading`."""
    servers = []
    for one in address.sockets:
        server = ThreadingHTTPServer(one.getsockname()[:2], _Loading, bind_and_activate=False)
        server.socket.close()
        server.socket = one.dup()
        server.block_on_close = False  # a client that sends nothing must not hold the start
        servers.append(server)
    threads = [threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


class _Loading(BaseHTTPRequestHandler):
    """Says it, to any request, without a look at what it asks."""

    timeout = 2.0  # of a client's silence
    error_content_type = "application/json"
    error_message_format = "{}"
    server_version, sys_version = "edge0", ""
    longest_body = 2**16  # that is read before it is answered: what comes unread resets the connection
    told: ClassVar[ApiError] = ApiError(503, "the model is being loaded; try again in a moment", None, "loading")

    def _answer(self) -> None:
        length = self.headers.get("Content-Length", "")
        self.rfile.read(min(int(length), self.longest_body) if length.isdecimal() else 0)
        body = {"status": "loading"} if self.path == "/health" else self.told.openai()
        data = json.dumps(body).encode()
        self.send_response(503)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(data)), "Connection": "close"}
        for name, value in (headers | {"Retry-After": str(RETRY_AFTER_S)}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        self.close_connection = True

    do_GET = do_HEAD = do_POST = do_OPTIONS = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""
