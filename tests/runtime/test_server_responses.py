"""OpenAI's responses by their own client, on the real engine and on scripted answers: whole, streamed, tools, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from edge0_runtime.engine import Engine
from edge0_runtime.text import chat_ids
from tests.runtime.marked_up import ARGUMENTS, CALL, JSON_TOOLS, scripted, with_template
from tests.runtime.marked_up import WEATHER as CHAT_WEATHER
from tests.runtime.scripted_server import HELLO, MODEL, WAIT_S, FakeEngine, client_of, error_of, live

RESPONSES = "/v1/responses"
WEATHER = {"type": "function", "strict": False} | CHAT_WEATHER["function"]
FIELDS: dict[str, Any] = {"model": MODEL, "input": "hello"}
GREEDY = {"temperature": 0, "max_output_tokens": 12}


def client_at(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=WAIT_S)


@pytest.fixture(scope="module")
def engine(tiny_dir, tmp_path_factory) -> Iterator[Engine]:
    directory = with_template(tiny_dir, tmp_path_factory.mktemp("responses") / "model", JSON_TOOLS)
    with Engine.load(directory) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def client(engine) -> Iterator[openai.OpenAI]:
    with live(engine) as url, client_at(url) as made:
        yield made


def test_an_answer_is_the_engines(client, engine):
    ids = chat_ids(engine.tokenizer, [{"role": "system", "content": "brief"}, *HELLO])
    made = [step.token for step in engine.generate(ids, max_tokens=12) if step.finish_reason != "stop"]
    whole = client.responses.create(**FIELDS, instructions="brief", store=False, **GREEDY)
    assert whole.object == "response" and whole.model == MODEL and whole.id.startswith("resp")
    assert whole.output_text == engine.tokenizer.decode(made, skip_special_tokens=True)
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (len(ids), 12)
    listed = client.responses.create(**FIELDS | {"input": HELLO}, instructions="brief", **GREEDY)
    assert listed.output_text == whole.output_text


def test_a_stream_adds_up_to_the_whole(client):
    whole = client.responses.create(**FIELDS, **GREEDY)
    with client.responses.stream(**FIELDS, **GREEDY) as stream:
        events = list(stream)
    final = events[-1].response
    assert final.output_text == whole.output_text and final.status == whole.status
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text


def test_logprobs_are_the_chats(client):
    chat = client.chat.completions.create(
        model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2, temperature=0, max_tokens=12
    )
    told = client.responses.create(**FIELDS, **GREEDY, top_logprobs=2, include=["message.output_text.logprobs"])
    expected = [one.model_dump() for one in chat.choices[0].logprobs.content]
    assert [one.model_dump() for one in told.output[0].content[0].logprobs] == expected


def test_a_random_model_keeps_to_a_schema_and_calls_as_it_must(client):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"format": {"type": "json_schema", "name": "it", "schema": schema}}
    text = client.responses.create(**FIELDS, temperature=0, max_output_tokens=120, text=form).output_text
    assert json.loads(text)["n"] in (1, 2)
    fields = FIELDS | {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    (item,) = client.responses.create(**fields, max_output_tokens=150).output
    assert item.type == "function_call" and item.name == "weather" and 1 <= json.loads(item.arguments)["days"] <= 9
    with client.responses.stream(**fields, max_output_tokens=150) as stream:
        (again,) = stream.get_final_response().output
    assert again.arguments == item.arguments


def test_thinking_text_and_calls_are_items_in_their_order_and_go_back_as_turns():
    engine = scripted(f"<think>Hm.</think>I look.{CALL}")
    with live(engine) as url, client_at(url) as client:
        fields = FIELDS | {"tools": [WEATHER], "max_output_tokens": 500}
        whole = client.responses.create(**fields)
        with client.responses.stream(**fields) as stream:
            final = stream.get_final_response()
        for response in (whole, final):
            assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
            assert response.output[0].content[0].text == "Hm." and response.output_text == "I look."
            assert json.loads(response.output[2].arguments) == ARGUMENTS
            assert response.status == "completed"
        assert whole.usage.output_tokens_details.reasoning_tokens > 0
        given = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in whole.output]
        result = {"type": "function_call_output", "call_id": whole.output[2].call_id, "output": "wet"}
        client.responses.create(**fields | {"input": [*HELLO, *given, result, *HELLO]})
    turns = "user:hello;assistant:Hm.I look.(weather [('city', 'Köln'), ('days', 2)]);tool:wet;user:hello;"
    assert engine.calls[-1].prompt.decode() == f"[weather]{turns}"


def test_a_failure_in_mid_stream_is_an_error_event():
    raises = pytest.raises(openai.APIError, match="generation failed")
    with live(FakeEngine(fail_at=2)) as url, client_at(url) as client, raises:
        list(client.responses.create(**FIELDS, stream=True))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["reasoning.encrypted_content"]}, "include[0]"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER]}, "tools"),  # this template has none
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].message.content",
        ),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "3"}]}, None),
        ({"input": "x" * 300}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"messages": HELLO}, "messages"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(fields, param):
    engine = FakeEngine()
    with client_of(engine) as client:
        response = client.post(RESPONSES, json=FIELDS | fields)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert param is None or (error["param"] == param and error["message"].startswith(param))
    assert not engine.calls
