"""The HTTP server over a scripted engine (tokens are bytes), in-process or on a port, and what its answers say."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import uvicorn
from fastapi.testclient import TestClient

from edge0_runtime.sampling import Defaults
from edge0_runtime.server.address import Address, bind
from edge0_runtime.server.app import create_app
from edge0_runtime.server.running import Server, app_config
from edge0_runtime.server.settings import Settings

END = 256
MODEL = "edge0-fake"
URL = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
WAIT_S = 20.0  # of events that come at once unless something is broken


class ByteTokenizer:
    """Token n is byte n; the chat template writes `role:content;` per turn."""

    chat_template = "role:content;"
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}
    init_kwargs: ClassVar[dict[str, Any]] = {}
    eos_token_id = END

    def get_vocab(self) -> dict[str, int]:
        return {chr(byte): byte for byte in range(128)}

    def apply_chat_template(
        self, turns: list[dict[str, str]], add_generation_prompt: bool, tokenize: bool, **_: Any
    ) -> str:
        return "".join(f"{turn['role']}:{turn['content']};" for turn in turns)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(token for token in ids if token < END).decode("utf-8", "replace")


@dataclass
class FakeEngine:
    """Generates `tokens`; waits for `go` before the token at `pause_at` and raises `problem` at `fail_at`."""

    tokens: Sequence[int] = (*b"Hi there", END)
    pause_at: int | None = None
    fail_at: int | None = None
    problem: BaseException = field(default_factory=lambda: OSError("/secret/model.safetensors: short read"))
    model_dir: Path = Path("/nowhere")
    context_length: int = 200
    eos_ids: frozenset[int] = frozenset({END})
    model: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(vocab_size=END + 1))
    calls: list[SimpleNamespace] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)
    paused: threading.Event = field(default_factory=threading.Event)
    closed: threading.Event = field(default_factory=threading.Event)
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)

    @property
    def defaults(self) -> Defaults:
        return Defaults.of_model(self.model_dir)

    def generate(self, prompt_ids: list[int], *, max_tokens: int, cancel: threading.Event, **sampling: Any):
        self.calls.append(
            SimpleNamespace(prompt=bytes(one for one in prompt_ids if one < END), max_tokens=max_tokens, **sampling)
        )
        return self._steps(max_tokens, cancel)

    def stats(self) -> dict[str, float]:
        return defaultdict(int)

    def _steps(self, max_tokens: int, cancel: threading.Event) -> Iterator[SimpleNamespace]:
        try:
            for index, token in enumerate(self.tokens):
                if index == self.pause_at:
                    self.paused.set()
                    while not cancel.is_set() and not self.go.wait(0.01):
                        pass
                if cancel.is_set():
                    yield SimpleNamespace(index=index, token=-1, finish_reason="cancelled", cached_tokens=0)
                    return
                if index == self.fail_at:
                    raise self.problem
                reason = "stop" if token == END else "length" if index + 1 == max_tokens else None
                yield SimpleNamespace(index=index, token=token, finish_reason=reason, cached_tokens=0)
                if reason:
                    return
        finally:
            self.closed.set()


@contextlib.contextmanager
def client_of(
    engine: Any, host: str = "127.0.0.1", settings: Settings | None = None, **headers: str
) -> Iterator[TestClient]:
    """In-process client. It cannot disconnect; `live` can."""
    app = create_app({MODEL: engine}, host, settings)
    with TestClient(app, base_url="http://127.0.0.1", headers=headers, raise_server_exceptions=False) as client:
        yield client


@contextlib.contextmanager
def live(engine: Any, settings: Settings | None = None) -> Iterator[str]:
    """A real server on a free port, of one engine or of several by name: its base URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # connections wait in the backlog until uvicorn has started
        app = create_app(engine if isinstance(engine, Mapping) else {MODEL: engine}, settings=settings)
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(WAIT_S)
            assert not thread.is_alive()


@contextlib.contextmanager
def served(engine: Any, grace_s: float = WAIT_S, address: Address | None = None) -> Iterator[tuple[Server, str]]:
    """A server as the command runs it, but in a thread: signals are given by `handle_exit`."""
    address = address or bind("127.0.0.1", 0)
    app = create_app({MODEL: engine}, address.host)
    server = Server(app_config(app), app.state.service, grace_s)
    thread = threading.Thread(target=server.run, kwargs={"sockets": address.sockets})
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{address.port}"
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        assert not thread.is_alive()


def ask(client: Any, **fields: Any) -> httpx.Response:
    return client.post(URL, json={"messages": HELLO} | fields)


def answer(engine: FakeEngine, **fields: Any) -> dict[str, Any]:
    with client_of(engine) as client:
        response = ask(client, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def streamed_text(chunks: list[Any]) -> str:
    choices = [choice for chunk in chunks if chunk != "[DONE]" for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "/" not in error["message"]
    return error
