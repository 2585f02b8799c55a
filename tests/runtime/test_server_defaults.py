"""What whoever serves sets: defaults of answers, another chat template; and what tools ask for beside answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest

from edge0_runtime.catalog import Catalog, Entry
from edge0_runtime.cli import main
from edge0_runtime.contract import rendering
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.engine import Engine
from edge0_runtime.server import answer, service
from edge0_runtime.server.settings import Settings
from edge0_runtime.text import chat_ids, load_tokenizer
from tests.runtime.conftest import NANO_ASSETS
from tests.runtime.scripted_server import (
    HELLO,
    URL,
    WAIT_S,
    FakeEngine,
    ask,
    client_of,
    error_of,
    events,
    live,
    streamed_text,
)


@pytest.fixture(scope="module")
def engine(tiny_dir) -> Iterator[Engine]:
    with Engine.load(tiny_dir) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def client(engine) -> Iterator[Any]:
    with client_of(engine) as made:
        yield made


# -- defaults ----------------------------------------------------------------------------------------------------------


def test_settings_come_before_the_models_own_and_behind_the_requests(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    engine = FakeEngine(model_dir=tmp_path)
    settings = Settings(max_tokens=5, sampling={"temperature": 0.25, "min_p": 0.5})
    with client_of(engine, settings=settings) as client:
        ask(client)
        ask(client, temperature=1.5, max_tokens=7)
        ask(client, max_completion_tokens=8)
        client.post("/v1/completions", json={"prompt": "x"})
    first, second, third, raw = engine.calls
    assert (first.temperature, first.min_p, first.top_k, first.top_p) == (0.25, 0.5, 20, 1.0)
    assert (first.max_tokens, second.max_tokens, third.max_tokens, raw.max_tokens) == (5, 7, 8, 5)
    assert (second.temperature, second.min_p) == (1.5, 0.5)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--temperature", "-1"], "--temperature: -1.0 must be"),
        (["--top-p", "0"], "--top-p: 0.0 must be"),
        (["--top-k", "1.5"], "--top-k: 1.5 must be"),
        (["--min-p", "nan"], "--min-p: nan must be"),
        (["--allow-origin", "app.example"], "--allow-origin"),
        (["--allow-host", "http://x"], "--allow-host"),
        (["--api-key-file", "/nowhere/keys"], "/nowhere/keys"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_said_before_loading(arguments, says, tmp_path, capsys):
    assert main(["serve", str(tmp_path / "nowhere"), *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and says in err and err.count("\n") == 1


# -- another template --------------------------------------------------------------------------------------------------


def load(directory: Any, template: Any) -> Catalog:
    return Catalog.load({"m": Entry(directory)}, chat_template=template)


def test_another_template_takes_the_place_of_the_models(tiny_dir, tmp_path, engine):
    path = tmp_path / "mine.jinja"
    path.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    with load(tiny_dir, path) as catalog, client_of(catalog["m"]) as client:
        body = {"messages": HELLO}
        assert client.post("/apply-template", json=body).json() == {"prompt": "<user>hello"}
        assert ask(client, max_tokens=1).json()["usage"]["prompt_tokens"] == len(
            engine.tokenizer.encode("<user>hello", add_special_tokens=False)
        )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("{% for m in %}", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "SecurityError"),
        ("{% include '/etc/passwd' %}", "TypeError"),
        ("x" * (rendering.MAX_TEMPLATE + 1), "bytes"),
        (b"\xff\xfe", "UTF-8"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "TimeoutError"),
        ("{% for i in range(99999) %}{{ range(99999) | sum }}{% endfor %}", "TimeoutError"),
        ("{% for i in range(9999) %}{{ range(99999) | map('string') | join }}{% endfor %}", "TimeoutError"),
        ("{% set x = 'x' * 1000000 %}{% for i in range(9) %}{{ x }}{% endfor %}", "ValueError"),
    ],
)
def test_a_template_that_cannot_be_served_is_named_before_loading(text, says, tiny_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(rendering, "RENDER_S", 0.2 if says == "TimeoutError" else WAIT_S)
    monkeypatch.setattr(rendering, "MAX_RENDERED", 2**22)
    monkeypatch.setattr("edge0_runtime.catalog.load_models", None)  # not reached
    path = tmp_path / "mine.jinja"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(Edge0Error, match=says) as refused:
        load(tiny_dir, path)
    assert str(refused.value).startswith(str(path)) and len(str(refused.value)) < 500


def test_a_template_that_turns_slow_with_a_conversation_fails_that_request_alone(tmp_path, tiny_dir, monkeypatch):
    slow = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    path = tmp_path / "mine.jinja"
    path.write_text("{% if messages | length > 1 %}" + slow + "{% endif %}{{ messages[0].content }}")
    with load(tiny_dir, path) as catalog, client_of(catalog["m"]) as client:
        with monkeypatch.context() as patch:
            patch.setattr(rendering, "RENDER_S", 0.2)
            refused = ask(client, messages=HELLO * 2)
        assert refused.status_code == 400 and "longer than 0.2 seconds" in error_of(refused)["message"]
        assert ask(client, max_tokens=1).status_code == 200


def test_rendering_under_the_clock_changes_nothing_and_leaves_a_debugger_alone():
    tokenizer = load_tokenizer(NANO_ASSETS, {"model_type": "qwen3_5_moe"})
    seen: list[str] = []

    def debugger(frame: Any, event: str, argument: Any) -> None:
        seen.append(event)

    sys.settrace(debugger)
    try:
        ids = chat_ids(tokenizer, HELLO)
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(None)
    assert seen and ids == chat_ids(tokenizer, HELLO)
    text = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, tokenize=False)
    assert ids == tokenizer.encode(text, add_special_tokens=False)


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_text_becomes_tokens_and_text_again(client, engine):
    text = "Add 12 and 30: ä😀"
    tokens = client.post("/tokenize", json={"content": text}).json()["tokens"]
    assert tokens == engine.tokenizer.encode(text, add_special_tokens=False)
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"content": text}
    pieces = client.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == tokens
    data = [piece["piece"].encode() if isinstance(piece["piece"], str) else bytes(piece["piece"]) for piece in pieces]
    assert b"".join(data).decode() == text
    assert any(isinstance(piece["piece"], list) for piece in pieces)  # 😀 spans tokens


def test_control_tokens_are_parsed_unless_told_otherwise(client, engine):
    (control,) = client.post("/tokenize", json={"content": "<|im_end|>"}).json()["tokens"]
    assert control in engine.eos_ids
    plain = client.post("/tokenize", json={"content": "<|im_end|>", "parse_special": False}).json()["tokens"]
    assert control not in plain and len(plain) > 1
    assert client.post("/detokenize", json={"tokens": plain}).json() == {"content": "<|im_end|>"}


def test_a_template_is_applied_as_a_chat_would(client, engine):
    prompt = client.post("/apply-template", json={"messages": HELLO}).json()["prompt"]
    assert prompt == engine.tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, tokenize=False)
    usage = ask(client, max_tokens=1).json()["usage"]
    tokens = client.post("/tokenize", json={"content": prompt}).json()["tokens"]
    assert usage["prompt_tokens"] == len(tokens)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": 3}, "content"),
        ("/tokenize", {"content": "\ud800"}, "content"),
        ("/tokenize", {"content": "x", "add_bos": True}, "add_bos"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [384]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [2**63]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
        ("/apply-template", {"messages": []}, "messages"),
        ("/tokenize", {"content": "x", "model": "other"}, "model"),
    ],
)
def test_what_has_no_tokens_is_refused_by_name(client, path, body, param):
    response = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 404)
    assert error_of(response)["param"] == param


# -- streams -----------------------------------------------------------------------------------------------------------


def test_a_stream_begins_before_its_first_token_and_says_that_it_lives(monkeypatch):
    monkeypatch.setattr(service, "FIRST_EVENT_S", 0.01)
    monkeypatch.setattr(answer, "KEEP_ALIVE_S", 0.01)
    engine, lines = FakeEngine(pause_at=0), []
    with live(engine) as url, httpx.Client(base_url=url, timeout=WAIT_S) as client:
        with client.stream("POST", URL, json={"messages": HELLO, "stream": True}) as response:
            assert response.status_code == 200  # although nothing was generated
            assert not engine.go.is_set()
            for line in response.iter_lines():
                lines.append(line)
                if len(lines) == 6:
                    engine.go.set()
        comments = [line for line in lines if line.startswith(":")]
        assert lines[:6] == [answer.KEEP_ALIVE.strip(), ""] * 3 and len(comments) >= 3
        response._content = "\n".join(line for line in lines if not line.startswith(":")).encode()
        assert streamed_text(events(response)) == "Hi there"


def test_progress_of_a_prompt_is_told_where_it_is_asked_for(engine, client, monkeypatch):
    monkeypatch.setattr(engine, "prefill_chunk", 8)
    monkeypatch.setattr(engine, "prefill_width", 16)
    long = [{"role": "user", "content": "12+34 " * 12}]
    for path, body in ((URL, {"messages": long}), ("/v1/completions", {"prompt": "12+34 " * 12})):
        asked = body | {"stream": True, "max_tokens": 3, "temperature": 0}
        chunks = events(client.post(path, json=asked | {"return_progress": True}))[:-1]
        told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
        prompt = client.post(path, json=asked | {"stream": False}).json()["usage"]["prompt_tokens"]
        assert {one["total"] for one in told} == {prompt} and {one["cache"] for one in told} == {0}
        steps = [one["processed"] for one in told]
        assert (steps[0], steps[-1]) == (0, prompt - 1)  # the last token goes alone, to the answer
        assert len(steps) >= 4 and all(0 < after - before <= 16 for before, after in pairwise(steps))
        assert [one["time_ms"] for one in told] == sorted(one["time_ms"] for one in told)
        plain = events(client.post(path, json=asked))[:-1]
        assert not any("prompt_progress" in chunk for chunk in plain)
        texts = [
            [choice.get("text", choice.get("delta", {}).get("content")) for chunk in one for choice in chunk["choices"]]
            for one in (chunks, plain)
        ]
        assert "".join(filter(None, texts[0])) == "".join(filter(None, texts[1])) != ""


def test_progress_without_a_stream_is_refused(client):
    response = ask(client, return_progress=True)
    assert response.status_code == 400 and "stream: true" in error_of(response)["message"]
