"""What the HTTP server honours of a request, what it refuses by name, and from whom."""

from __future__ import annotations

import json

import pytest

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.server.app import create_app
from edge0_runtime.server.guard import MAX_BODY_BYTES
from tests.runtime.scripted_server import (
    HELLO,
    MODEL,
    URL,
    FakeEngine,
    answer,
    ask,
    client_of,
    error_of,
)

# -- requests ----------------------------------------------------------------------------------------------------------


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
        create_app({MODEL: engine})


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
    neutral |= {"logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0, "top_logprobs": 0}
    neutral |= {"service_tier": "auto", "modalities": ["text"], "parallel_tool_calls": True, "verbosity": "medium"}
    neutral |= {"functions": [], "function_call": "none", "stream_options": {"include_obfuscation": False}}
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": True, "prompt_cache_key": "k", "safety_identifier": "s"}
    turn = HELLO[0] | {"name": "me", "annotations": [], "tool_calls": []}
    engine = FakeEngine()
    assert answer(engine)["choices"] == answer(engine, messages=[turn], **neutral, **harmless)["choices"]
    assert engine.calls[0] == engine.calls[1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [*HELLO, {"role": "user"}]}, "messages[1]"),
        ({"messages": [*HELLO, {"role": "user", "content": None}]}, "messages[1]"),
        ({"messages": [*HELLO, {"role": "tool", "content": "3"}]}, "messages[1]"),
        ({"messages": [*HELLO, {"role": "tool", "content": "3", "tool_call_id": "c"}]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, 3]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": [HELLO[0] | {"tool_call_id": "1"}]}, "messages[0]"),
        ({"n": 5}, "n"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, None),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),  # this template has none
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"date_string": "today"}}, "chat_template_kwargs.date_string"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"logit_bias": {"257": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"²": 5}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"continue_final_message": True}, None),
        ({"add_generation_prompt": False}, None),
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


# -- who may ask -------------------------------------------------------------------------------------------------------


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
    with pytest.raises(Edge0Error, match=r"EDGE0_API_KEY.*--api-key-file"):
        create_app({MODEL: FakeEngine()}, "0.0.0.0")
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
