"""Anthropic's messages by their own client, on the real engine and on scripted answers: whole, streamed, tools, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from edge0_runtime.engine import Engine
from edge0_runtime.text import chat_ids
from tests.runtime.marked_up import ARGUMENTS, CALL, JSON_TOOLS, scripted, with_template
from tests.runtime.scripted_server import HELLO, MODEL, WAIT_S, FakeEngine, client_of, live

MESSAGES = "/v1/messages"
GREEDY = {"extra_body": {"temperature": 0}}  # their client has no argument for it any more
FIELDS: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "messages": HELLO}
WEATHER = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 4},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
    },
}


def client_at(url: str, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0, timeout=WAIT_S, **options)


@pytest.fixture(scope="module")
def engine(tiny_dir, tmp_path_factory) -> Iterator[Engine]:
    directory = with_template(tiny_dir, tmp_path_factory.mktemp("anthropic") / "model", JSON_TOOLS)
    with Engine.load(directory) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def client(engine) -> Iterator[anthropic.Anthropic]:
    with live(engine) as url, client_at(url) as made:
        yield made


def reference(engine: Engine, turns: list[Any], count: int, **options: Any) -> tuple[int, str]:
    """Length of the prompt, and the greedy text, by the engine alone."""
    ids = chat_ids(engine.tokenizer, turns, **options)
    made = [step.token for step in engine.generate(ids, max_tokens=count) if step.finish_reason != "stop"]
    return len(ids), engine.tokenizer.decode(made, skip_special_tokens=True)


# -- the real engine ---------------------------------------------------------------------------------------------------


def test_an_answer_is_the_engines(client, engine):
    length, text = reference(engine, [{"role": "system", "content": "brief"}, *HELLO], 12)
    whole = client.messages.create(**FIELDS, system="brief", **GREEDY)
    assert whole.type == "message" and whole.role == "assistant" and whole.model == MODEL and whole.id.startswith("msg")
    assert [block.text for block in whole.content] == [text]
    assert whole.stop_reason == "max_tokens" and whole.stop_sequence is None
    assert whole.usage.input_tokens == length and whole.usage.output_tokens == 12
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO, system=[{"type": "text", "text": "brief"}])
    assert counted.input_tokens == length


def test_a_stream_adds_up_to_the_whole(client):
    whole = client.messages.create(**FIELDS, **GREEDY)
    with client.messages.stream(**FIELDS, **GREEDY) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert [block.text for block in final.content] == [block.text for block in whole.content]
    assert final.stop_reason == whole.stop_reason
    assert (final.usage.input_tokens, final.usage.output_tokens) == (whole.usage.input_tokens, 12)
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and kinds.count("content_block_start") == 1


def test_a_last_turn_of_the_assistant_goes_on(client, engine):
    turns = [*HELLO, {"role": "assistant", "content": "12 + 30 ="}]
    length, text = reference(engine, turns, 8, continue_final=True)
    answer = client.messages.create(model=MODEL, max_tokens=8, messages=turns, **GREEDY)
    assert answer.usage.input_tokens == length and answer.content[0].text == text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_random_model_calls_as_it_must(client, choice):
    fields = FIELDS | {"max_tokens": 150, "tools": [WEATHER]}
    fields["tool_choice"] = choice | {"disable_parallel_tool_use": True}
    whole = client.messages.create(**fields, **GREEDY)
    assert whole.stop_reason == "tool_use"
    (block,) = whole.content
    assert block.type == "tool_use" and block.name == "weather" and 1 <= block.input["days"] <= 9
    with client.messages.stream(**fields, **GREEDY) as stream:
        (again,) = stream.get_final_message().content
    assert again.input == block.input


def test_a_stop_sequence_is_named(client):
    text = client.messages.create(**FIELDS, **GREEDY).content[0].text
    stop = text[3:6]
    cut = client.messages.create(**FIELDS, **GREEDY, stop_sequences=["zzz", stop])
    assert cut.stop_reason == "stop_sequence" and cut.stop_sequence == stop
    assert cut.content[0].text == text[: text.index(stop)]


def test_what_is_neutral_or_a_hint_changes_nothing(client):
    plain = client.messages.create(**FIELDS, **GREEDY)
    part = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}
    said = client.messages.create(
        **FIELDS | {"messages": [{"role": "user", "content": [part]}]},
        **GREEDY,
        metadata={"user_id": "me"},
        service_tier="auto",
        thinking={"type": "disabled"},
        tools=[],
    )
    assert said.content == plain.content


# -- scripted answers --------------------------------------------------------------------------------------------------


@pytest.fixture
def answered():
    """answered(text, **fields) -> the message that the client makes of a model's text, whole and streamed alike."""

    def create(text: str, **fields: Any) -> Any:
        with live(scripted(text)) as url, client_at(url) as client:
            wanted = FIELDS | {"max_tokens": 500} | fields
            whole = client.messages.create(**wanted)
            with client.messages.stream(**wanted) as stream:
                final = stream.get_final_message()
        unnamed = [[block.model_dump(exclude={"id"}) for block in message.content] for message in (whole, final)]
        assert unnamed[0] == unnamed[1] and whole.stop_reason == final.stop_reason
        return whole

    return create


def test_thinking_text_and_calls_are_blocks_in_their_order(answered):
    message = answered(f"<think>Hm.</think>Let me look.{CALL}{CALL}", tools=[WEATHER])
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[0].thinking == "Hm." and message.content[1].text == "Let me look."
    assert message.content[2].input == ARGUMENTS and message.stop_reason == "tool_use"


def test_an_empty_answer_has_one_empty_block(answered):
    assert [block.text for block in answered("").content] == [""]


def test_calls_and_results_reach_the_template():
    engine = scripted("Rain.")
    turns = [
        *HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": ARGUMENTS},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "wet"}],
                    "is_error": True,
                },
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    with live(engine) as url, client_at(url) as client:
        client.messages.create(**FIELDS | {"messages": turns}, tools=[WEATHER])
    called = "hmI look.(weather [('city', 'Köln'), ('days', 2)])"
    expected = f"[weather]user:hello;assistant:{called};tool:Error: wet;user:So?;"
    assert engine.calls[0].prompt.decode() == expected


# -- refusals and faults -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "messages[0]"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "messages[0]",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [WEATHER]}, "tools"),  # this template has none
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"container": "c"}, "container"),
        ({"logprobs": True}, "logprobs"),
        ({"model": "claude"}, "model"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
    ],
)
@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
def test_refusals_have_anthropics_error_object(fields, word, path):
    body = FIELDS | fields
    if path != MESSAGES:
        if word in ("max_tokens", "temperature", "logprobs") or "context" in word:
            return
        del body["max_tokens"]
    with client_of(FakeEngine()) as client:
        response = client.post(path, json=body)
    assert response.status_code == (404 if word == "model" else 400), response.text
    error = response.json()
    assert error["type"] == "error" and error["error"]["message"].startswith(word)
    assert error["error"]["type"] == ("not_found_error" if word == "model" else "invalid_request_error")


def test_the_key_is_taken_as_anthropics_clients_send_it(monkeypatch):
    monkeypatch.setenv("EDGE0_API_KEY", "geheim")
    with live(FakeEngine()) as url:
        with anthropic.Anthropic(base_url=url, api_key="geheim", max_retries=0) as client:
            assert client.messages.create(**FIELDS).content[0].text == "Hi there"
        wrong = anthropic.Anthropic(base_url=url, api_key="falsch", max_retries=0)
        with wrong, pytest.raises(anthropic.AuthenticationError):
            wrong.messages.create(**FIELDS)
        headers = {"Authorization": "bearer geheim"}
        assert httpx.post(url + MESSAGES, json=FIELDS, headers=headers).status_code == 200


def test_a_failure_in_mid_stream_is_anthropics_error_event():
    with live(FakeEngine(fail_at=2)) as url, client_at(url) as client:
        with (
            pytest.raises(anthropic.APIStatusError, match="generation failed"),
            client.messages.stream(**FIELDS) as stream,
        ):
            list(stream)
        response = httpx.post(url + MESSAGES, json=FIELDS | {"stream": True})
    *_, last = response.text.strip().split("\n\n")
    name, data = last.split("\n")
    assert name == "event: error" and json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"
