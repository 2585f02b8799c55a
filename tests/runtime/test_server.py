"""The HTTP server over a scripted engine (tokens are bytes), and over the real one by OpenAI's own client."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from fastapi.testclient import TestClient

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.server.app import create_app
from edge0_runtime.server.guard import MAX_BODY_BYTES
from edge0_runtime.server.worker import MAX_WAITING

END = 256
MODEL = "edge0-fake"
URL = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
WAIT_S = 20.0  # of events that come at once unless something is broken


class ByteTokenizer:
    """Token n is byte n; the chat template writes `role:content;` per turn."""

    has_chat_template = True

    def apply_chat_template(self, turns: list[dict[str, str]], add_generation_prompt: bool) -> list[int]:
        return list("".join(f"{turn['role']}:{turn['content']};" for turn in turns).encode())

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
    calls: list[SimpleNamespace] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)
    paused: threading.Event = field(default_factory=threading.Event)
    closed: threading.Event = field(default_factory=threading.Event)
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)

    def generate(self, prompt_ids: list[int], *, max_tokens: int, cancel: threading.Event, **sampling: Any):
        self.calls.append(SimpleNamespace(prompt=bytes(prompt_ids), max_tokens=max_tokens, **sampling))
        return self._steps(max_tokens, cancel)

    def _steps(self, max_tokens: int, cancel: threading.Event) -> Iterator[SimpleNamespace]:
        try:
            for index, token in enumerate(self.tokens):
                if index == self.pause_at:
                    self.paused.set()
                    while not cancel.is_set() and not self.go.wait(0.01):
                        pass
                if cancel.is_set():
                    yield SimpleNamespace(index=index, token=-1, finish_reason="cancelled")
                    return
                if index == self.fail_at:
                    raise self.problem
                reason = "stop" if token == END else "length" if index + 1 == max_tokens else None
                yield SimpleNamespace(index=index, token=token, finish_reason=reason)
                if reason:
                    return
        finally:
            self.closed.set()


@contextlib.contextmanager
def client_of(engine: FakeEngine, host: str = "127.0.0.1", **headers: str) -> Iterator[TestClient]:
    """In-process client. It cannot disconnect; `live` can."""
    app = create_app(engine, MODEL, host)
    with TestClient(app, base_url="http://127.0.0.1", headers=headers, raise_server_exceptions=False) as client:
        yield client


@contextlib.contextmanager
def live(engine: Any) -> Iterator[str]:
    """A real server on a free port: its base URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # connections wait in the backlog until uvicorn has started
        app = create_app(engine, MODEL)
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
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


# -- shapes ------------------------------------------------------------------------------------------------


def test_a_whole_answer_has_openais_shape():
    body = answer(FakeEngine())
    assert body["object"] == "chat.completion" and body["model"] == MODEL and body["id"].startswith("chatcmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi there"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {"prompt_tokens": 11, "completion_tokens": 9, "total_tokens": 20}
    assert body["timings"]["total_s"] >= body["timings"]["first_token_s"] >= body["timings"]["queued_s"] >= 0


def test_a_streamed_answer_is_the_same_text_with_exactly_one_end():
    with client_of(FakeEngine()) as client:
        response = ask(client, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response)
    assert done == "[DONE]"
    assert streamed_text(chunks) == "Hi there"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)


def test_include_usage_adds_one_chunk_without_choices():
    with client_of(FakeEngine()) as client:
        *chunks, last, _ = events(ask(client, stream=True, stream_options={"include_usage": True}))
        for nothing in ({}, None, {"include_usage": None}):
            assert streamed_text(events(ask(client, stream=True, stream_options=nothing))) == "Hi there"
    assert last["choices"] == [] and last["usage"]["total_tokens"] == 20
    assert all(chunk["usage"] is None for chunk in chunks)


def test_characters_that_span_tokens_arrive_whole():
    text = "a😀한b"
    with client_of(FakeEngine([*text.encode(), END])) as client:
        chunks = events(ask(client, stream=True))
        whole = ask(client).json()
    assert "\ufffd" not in json.dumps(chunks, ensure_ascii=False)
    assert streamed_text(chunks) == text == whole["choices"][0]["message"]["content"]


def test_a_truncated_character_is_the_same_streamed_and_whole():
    with client_of(FakeEngine("a😀".encode())) as client:
        assert streamed_text(events(ask(client, stream=True, max_tokens=3))) == "a\ufffd"
        assert ask(client, max_tokens=3).json()["choices"][0]["message"]["content"] == "a\ufffd"


@pytest.mark.parametrize("stop", ["own fox", ["zzz", "own fox"]])
def test_a_stop_string_ends_the_generation_and_is_not_sent(stop):
    engine = FakeEngine([*b"the brown fox jumps", END])
    with client_of(engine) as client:
        chunks = events(ask(client, stream=True, stop=stop))
        whole = ask(client, stop=stop).json()
    assert streamed_text(chunks) == "the br" == whole["choices"][0]["message"]["content"]
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == len("the brown fox")
    assert engine.closed.is_set()


def test_length_is_the_reason_only_at_the_limit():
    engine = FakeEngine()
    assert answer(engine, max_tokens=3)["choices"][0] | {"logprobs": None} == {
        "index": 0,
        "message": {"role": "assistant", "content": "Hi "},
        "logprobs": None,
        "finish_reason": "length",
    }
    assert answer(engine, max_tokens=9)["choices"][0]["finish_reason"] == "stop"


def test_models_and_health():
    with client_of(FakeEngine()) as client:
        models = client.get("/v1/models").json()
        assert models["object"] == "list"
        assert models["data"] == [client.get(f"/v1/models/{MODEL}").json()]
        assert client.get("/v1/models/other").status_code == 404
        assert client.get("/health").json() == {"status": "ok", "waiting": 0}
        assert error_of(client.get("/v1/nothing"))["message"] == "Not Found"


# -- requests ----------------------------------------------------------------------------------------------


def test_messages_reach_the_template_joined_and_with_known_roles():
    engine = FakeEngine()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer(engine, messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}])
    assert engine.calls[0].prompt == b"system:be brief;user:ab;"


def test_null_is_as_if_absent():
    engine = FakeEngine()
    optional = [
        "model",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "stop",
        "seed",
        "stream",
    ]
    optional += ["n", "tools", "tool_choice", "logprobs", "response_format", "logit_bias", "user", "metadata"]
    answer(engine)
    answer(engine, **dict.fromkeys(optional))
    assert engine.calls[0] == engine.calls[1]


def test_sampling_reaches_the_engine_and_defaults_are_openais():
    engine = FakeEngine()
    answer(engine)
    answer(engine, temperature=0, top_p=0.5, top_k=3, min_p=0.1, seed=-1, max_completion_tokens=7)
    default, asked = engine.calls
    assert (default.temperature, default.top_p, default.top_k, default.min_p) == (1.0, 1.0, 0, 0.0)
    assert default.seed is None and default.max_tokens == engine.context_length - 11
    assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p) == (0, 0.5, 3, 0.1)
    assert asked.seed == 2**64 - 1 and asked.max_tokens == 7


def test_the_models_generation_config_gives_the_defaults(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "eos_token_id": 2}')
    engine = FakeEngine(model_dir=tmp_path)
    answer(engine, top_k=5)
    assert (engine.calls[0].temperature, engine.calls[0].top_p, engine.calls[0].top_k) == (0.6, 1.0, 5)
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(Edge0Error, match="generation_config"):
        create_app(engine, MODEL)


def test_the_context_limit_wins_over_max_tokens_and_long_prompts_are_refused():
    engine = FakeEngine(context_length=20)
    answer(engine, max_tokens=10**6)
    assert engine.calls[0].max_tokens == 9
    with client_of(engine) as client:
        for length in (14, 15, 4000):
            response = ask(client, messages=[{"role": "user", "content": "x" * length}])
            assert response.status_code == 400
            assert error_of(response)["code"] == "context_length_exceeded"
    assert len(engine.calls) == 1


def test_neutral_values_of_unsupported_fields_are_accepted():
    neutral = {
        "n": 1,
        "logprobs": False,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
    }
    neutral |= {"logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0}
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": True}
    assert answer(FakeEngine(), **neutral, **harmless)["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [*HELLO, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [*HELLO, {"role": "user", "content": None}]}, "messages[1].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, 3]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": [HELLO[0] | {"tool_call_id": "1"}]}, "messages[0].tool_call_id"),
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, None),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": [1]}, "stop[0]"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"model": 3}, "model"),
        ({"verbosity": "low"}, "verbosity"),
        ({"\ud800": 1}, None),
        ({"x" * 10**6: 1}, "x" * 100 + "..."),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(fields, param):
    engine = FakeEngine()
    with client_of(engine) as client:
        response = client.post(
            URL,
            content=json.dumps({"messages": HELLO} | fields),
            headers={"Content-Type": "application/json"},
        )
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"].startswith(param or "body")
    assert not engine.calls


@pytest.mark.parametrize("body", ["", "{", "[]", "3", "null", '{"messages": NaN}', "[" * 100_000, b"\xff"])
def test_a_body_that_is_no_request_is_refused(body):
    with client_of(FakeEngine()) as client:
        response = client.post(URL, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


def test_numbers_that_json_does_not_have_are_refused():
    with client_of(FakeEngine()) as client:
        for value in ("NaN", "Infinity", "1e999"):
            body = f'{{"messages": {json.dumps(HELLO)}, "temperature": {value}}}'
            response = client.post(URL, content=body, headers={"Content-Type": "application/json"})
            assert response.status_code == 400
            assert error_of(response)["param"] == "temperature"


def test_an_unknown_model_is_a_404_in_openais_shape():
    with client_of(FakeEngine()) as client:
        response = ask(client, model="gpt-5")
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


# -- failures ----------------------------------------------------------------------------------------------


def test_an_exception_fails_its_request_only():
    engine = FakeEngine(fail_at=0)
    with client_of(engine) as client:
        for fields in ({}, {"stream": True}):
            response = ask(client, **fields)
            assert response.status_code == 500
            assert error_of(response)["type"] == "server_error"
        engine.fail_at = None
        assert ask(client).status_code == 200
        assert client.get("/health").status_code == 200


def test_an_exception_in_mid_stream_is_an_error_object_and_no_end():
    with client_of(FakeEngine(fail_at=2)) as client:
        *chunks, last = events(ask(client, stream=True))
    assert streamed_text(chunks) == "Hi"
    assert last["error"]["type"] == "server_error" and "secret" not in json.dumps(last)
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_thread_dies_health_says_so():
    with client_of(FakeEngine(fail_at=0, problem=SystemExit(3))) as client:
        assert ask(client).status_code == 500
        assert client.get("/health").status_code == 503
        response = ask(client)
        assert response.status_code == 503
        assert error_of(response)["code"] == "engine_ended"


# -- lifecycle ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pause_at", [0, 3], ids=["during prefill", "in mid-text"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_stops_the_generation(pause_at, stream):
    engine = FakeEngine(pause_at=pause_at)
    with live(engine) as url:
        gone = client_that_waits(url, stream)
        assert engine.paused.wait(WAIT_S)
        gone.close()
        assert engine.closed.wait(WAIT_S)  # although nobody let it go on
        engine.pause_at = None
        assert ask(httpx.Client(base_url=url)).json()["choices"][0]["finish_reason"] == "stop"


def client_that_waits(url: str, stream: bool) -> socket.socket:
    """A request on its way, without anybody to read the answer."""
    body = json.dumps({"messages": HELLO, "stream": stream})
    connection = socket.create_connection(("127.0.0.1", httpx.URL(url).port))
    head = ["Host: 127.0.0.1", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    connection.sendall("\r\n".join([f"POST {URL} HTTP/1.1", *head, "", body]).encode())
    return connection


def test_a_full_queue_answers_503_until_somebody_leaves():
    engine = FakeEngine(pause_at=0)
    with live(engine) as url, httpx.Client(base_url=url) as client:
        running = client_that_waits(url, stream=False)
        assert engine.paused.wait(WAIT_S)
        waiting = [client_that_waits(url, stream=False) for _ in range(MAX_WAITING)]
        until(lambda: client.get("/health").json()["waiting"] == MAX_WAITING)
        response = ask(client)
        assert response.status_code == 503
        assert error_of(response)["code"] == "queue_full"
        assert int(response.headers["retry-after"]) > 0
        for connection in waiting:
            connection.close()
        until(lambda: client.get("/health").json()["waiting"] == 0)
        engine.go.set()
        assert ask(client).status_code == 200
        assert len(engine.calls) == 2  # those who left the queue were never started
        running.close()


def until(condition: Callable[[], bool]) -> None:
    """Ask the server again and again; each request is the pause."""
    assert any(condition() for _ in range(5000))


def test_shutting_down_ends_a_running_generation():
    engine = FakeEngine(pause_at=3)
    with live(engine) as url:
        connection = client_that_waits(url, stream=True)
        assert engine.paused.wait(WAIT_S)
    assert engine.closed.is_set()  # although nobody let it go on
    connection.close()


# -- who may ask -------------------------------------------------------------------------------------------


def test_on_loopback_other_hosts_and_origins_are_refused():
    with client_of(FakeEngine()) as client:
        for host in ("localhost:8080", "127.0.0.1", "[::1]:8080"):
            assert client.get("/v1/models", headers={"Host": host}).status_code == 200
        for host in ("evil.example", "127.0.0.1.evil.example", ""):
            assert client.get("/v1/models", headers={"Host": host}).status_code == 400
        assert client.get("/v1/models", headers={"Origin": "http://localhost:3000"}).status_code == 200
        for origin in ("https://evil.example", "null", "http://["):
            assert client.get("/v1/models", headers={"Origin": origin}).status_code == 403


def test_there_is_no_cors_and_no_form_post():
    with client_of(FakeEngine()) as client:
        preflight = client.options(URL, headers={"Origin": "http://localhost", "Access-Control-Request-Method": "POST"})
        assert preflight.status_code == 405
        assert not [name for name in preflight.headers if name.startswith("access-control")]
        form = client.post(URL, content=json.dumps({"messages": HELLO}), headers={"Content-Type": "text/plain"})
        assert form.status_code == 400


def test_another_address_needs_a_key_and_a_key_is_asked_for(monkeypatch):
    monkeypatch.delenv("EDGE0_API_KEY", raising=False)
    with pytest.raises(Edge0Error, match="EDGE0_API_KEY"):
        create_app(FakeEngine(), MODEL, "0.0.0.0")
    monkeypatch.setenv("EDGE0_API_KEY", "geheim-ü")
    for host in ("0.0.0.0", "127.0.0.1"):
        with client_of(FakeEngine(), host) as client:
            for key in ("", "Bearer falsch", "geheim-ü", "Bearer geheim-ü "):
                response = client.post(URL, json={"messages": HELLO}, headers={b"Authorization": key.encode()})
                assert response.status_code == 401
                assert error_of(response)["code"] == "invalid_api_key"
            right = {b"Authorization": "Bearer geheim-ü".encode()}
            assert client.post(URL, json={"messages": HELLO}, headers=right).status_code == 200
            assert client.get("/health").status_code == 200


def test_large_bodies_are_refused_announced_or_not():
    big = json.dumps({"messages": [{"role": "user", "content": "x" * MAX_BODY_BYTES}]}).encode()
    halves = [big[: len(big) // 2], big[len(big) // 2 :]]
    engine = FakeEngine()
    with client_of(engine) as client:
        for content in (big, iter(halves)):
            response = client.post(URL, content=content, headers={"Content-Type": "application/json"})
            assert response.status_code == 413
            assert "limit" in error_of(response)["message"]
    assert not engine.calls


# -- OpenAI's client ---------------------------------------------------------------------------------------


def openai_client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=WAIT_S)


def test_openais_client_understands_answers_and_errors():
    engine = FakeEngine()
    with live(engine) as url, openai_client(url) as client:
        whole = client.chat.completions.create(model=MODEL, messages=HELLO)
        assert whole.choices[0].message.content == "Hi there"
        client.chat.completions.create(model=MODEL, messages=[*HELLO, whole.choices[0].message, *HELLO])
        stream = client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hi there"
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 9
        assert [model.id for model in client.models.list()] == [MODEL]
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=HELLO)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(model=MODEL, messages=HELLO, temperature=3)
        engine.fail_at = 2
        with pytest.raises(openai.APIError, match="generation failed"):
            list(client.chat.completions.create(model=MODEL, messages=HELLO, stream=True))


def test_the_real_engine_answers_alike_streamed_or_not_and_as_often_as_asked(tiny_dir):
    from edge0_runtime.engine import Engine

    turns = [[{"role": "user", "content": text}] for text in ("1+1", "12*3", "reverse 123")]
    with Engine.load(tiny_dir) as engine, live(engine) as url, openai_client(url) as client:

        def text(messages: Any, **options: Any) -> str:
            fields = {"temperature": 0, "max_tokens": 12} | options
            answer = client.chat.completions.create(model=MODEL, messages=messages, **fields)
            if not options.get("stream"):
                return answer.choices[0].message.content or ""
            return "".join(chunk.choices[0].delta.content or "" for chunk in answer)

        first = [text(messages) for messages in turns]
        assert len(set(first)) == len(first)
        assert [text(messages, stream=True) for messages in turns] == first
        hot = [text(turns[0], temperature=1.5, seed=seed) for seed in (7, 8, 7)]
        assert hot[0] == hot[2] != hot[1]
        assert text(turns[0], temperature=1.5) != text(turns[0], temperature=1.5)
        assert text(turns[0]) == first[0]
        with pytest.raises(openai.BadRequestError, match="context"):
            text([{"role": "user", "content": "1" * engine.context_length}])
