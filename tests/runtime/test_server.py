"""Answers of the HTTP server, whole and streamed: over a scripted engine, and over the real one by OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.runtime.scripted_server import (
    END,
    HELLO,
    MODEL,
    WAIT_S,
    FakeEngine,
    answer,
    ask,
    client_of,
    error_of,
    events,
    live,
    streamed_text,
)

# -- shapes ------------------------------------------------------------------------------------------------------------


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
    cached = {
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert body["usage"] == {"prompt_tokens": 11, "completion_tokens": 9, "total_tokens": 20} | cached
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
        assert client.get("/health").json() == {"status": "ready", "waiting": 0, "running": 0}
        assert error_of(client.get("/v1/nothing"))["message"] == "Not Found"


# -- OpenAI's client ---------------------------------------------------------------------------------------------------


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
