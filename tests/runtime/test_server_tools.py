"""Tools and thinking in OpenAI's chat: what a scripted model writes is parted; a real one is made to call by a grammar."""

from __future__ import annotations

import json
from typing import Any

import httpx
import llguidance
import openai
import pytest

from edge0_runtime.engine import Engine
from edge0_runtime.server.markup import Markup
from edge0_runtime.server.tools import Calling, calls_grammar
from edge0_runtime.server.vocabulary import Vocabulary
from tests.runtime.marked_up import ARGUMENTS, CALL, JSON_TOOLS, WEATHER, XML_TOOLS, scripted, with_template
from tests.runtime.scripted_server import HELLO, MODEL, WAIT_S, answer, ask, client_of, error_of, events, live

TOOLS = {"tools": [WEATHER]}


def streamed(engine: Any, **fields: Any) -> dict[str, Any]:
    """A stream's deltas, put together as OpenAI's clients do."""
    with client_of(engine) as client:
        *chunks, done = events(ask(client, stream=True, **fields))
    assert done == "[DONE]"
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        for name in ("content", "reasoning_content"):
            message[name] += choice["delta"].get(name) or ""
        for call in choice["delta"].get("tool_calls", ()):
            if call["index"] == len(message["calls"]):
                message["calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            message["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        message["reason"] = choice["finish_reason"]
    return message


# -- what a model writes -----------------------------------------------------------------------------------------------


def test_a_call_is_a_call_and_not_text():
    message = answer(scripted(f"Let me look.{CALL}"), **TOOLS)["choices"][0]
    assert message["finish_reason"] == "tool_calls"
    assert message["message"]["content"] == "Let me look."
    (call,) = message["message"]["tool_calls"]
    assert call["type"] == "function" and call["function"]["name"] == "weather" and call["id"].startswith("call_")
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS


def test_streamed_calls_are_the_same():
    message = streamed(scripted(f"Let me look.{CALL}\n{CALL}"), **TOOLS)
    assert message["content"] == "Let me look." and message["reason"] == "tool_calls"
    assert [json.loads(call["arguments"]) for call in message["calls"]] == [ARGUMENTS, ARGUMENTS]
    assert len({call["id"] for call in message["calls"]}) == 2


def test_without_text_the_content_is_null_and_one_call_may_be_enough():
    engine = scripted(f"{CALL}{CALL} and more")
    one = answer(engine, parallel_tool_calls=False, **TOOLS)["choices"][0]
    assert one["message"]["content"] is None and len(one["message"]["tool_calls"]) == 1
    assert one["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("length", range(11, len(CALL.encode()) - 1, 7))
def test_a_call_that_is_cut_stays_text(length):
    """At whatever byte: no call, no lost text, no broken connection."""
    for message in (
        answer(scripted(CALL), max_tokens=length, **TOOLS)["choices"][0]["message"],
        streamed(scripted(CALL), max_tokens=length, **TOOLS) | {"tool_calls": None},
    ):
        assert not message.get("tool_calls") and not message.get("calls")
        assert message["content"] == CALL.encode()[:length].decode("utf-8", "replace")


@pytest.mark.parametrize(
    "inside",
    [
        "not json",
        '{"name": "weather", "arguments": [1]}',
        '{"name": "other", "arguments": {}}',
        '{"name": ["weather"], "arguments": {}}',
        '{"name": "weather", "arguments": {"city": "\\ud800"}}',
        '{"name": "weather", "arguments": {"days": NaN}}',
        "[" * 90,
        "3",
        "",
    ],
)
def test_what_is_no_call_of_a_given_tool_stays_text(inside):
    written = f"<tool_call>{inside}</tool_call>!"
    assert answer(scripted(written), **TOOLS)["choices"][0]["message"] == {"role": "assistant", "content": written}
    assert streamed(scripted(written), **TOOLS)["content"] == written


def test_without_tools_or_with_none_wanted_markup_is_text_and_nothing_is_offered():
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        engine = scripted(CALL)
        assert answer(engine, **fields)["choices"][0]["message"]["content"] == CALL
        assert engine.calls[0].prompt == b"user:hello;"


def test_tools_calls_and_results_reach_the_template():
    engine = scripted("Rain.")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}}
    turns = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "wet"},
    ]
    answer(engine, messages=turns, **TOOLS)
    expected = "[weather]user:hello;assistant:hm(weather [('city', 'Köln'), ('days', 2)]);tool:wet;"
    assert engine.calls[0].prompt.decode() == expected


def test_a_choice_among_tools_must_be_one_of_them():
    named = {"type": "function", "function": {"name": "other"}}
    with client_of(scripted("")) as client:
        for fields in ({"tool_choice": named}, {"tools": [WEATHER, WEATHER]}):
            response = ask(client, **(TOOLS | fields))
            assert response.status_code == 400
            assert error_of(response)["param"] in ("tool_choice", "tools")


# -- thinking ----------------------------------------------------------------------------------------------------------


def test_thinking_is_told_apart_from_the_answer():
    body = answer(scripted("<think>\nTwo and two.\n</think>\n\nFour."))
    message = body["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two.\n"}
    assert 0 < body["usage"]["completion_tokens_details"]["reasoning_tokens"] < body["usage"]["completion_tokens"]
    again = streamed(scripted("<think>\nTwo and two.\n</think>\n\nFour."))
    assert again["content"] == "Four." and again["reasoning_content"] == "Two and two.\n"


@pytest.mark.parametrize("fields", [{"chat_template_kwargs": {"enable_thinking": True}}, {"reasoning_effort": "low"}])
def test_an_answer_may_begin_in_the_midst_of_thinking(fields):
    engine = scripted("Hm.</think>Four.")
    message = answer(engine, **fields)["choices"][0]["message"]
    assert message["content"] == "Four." and message["reasoning_content"] == "Hm."
    assert answer(engine, reasoning_effort="none")["choices"][0]["message"]["content"] == "Hm.</think>Four."


def test_a_marker_is_found_however_it_is_cut_and_half_of_one_is_text():
    message = streamed(scripted("a <thin b <think>c</think>d <tool_cal"), **TOOLS)
    assert message["content"] == "a <thin b d <tool_cal" and message["reasoning_content"] == "c"


# -- made to call, on the real engine ----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[JSON_TOOLS, XML_TOOLS], ids=["json_tools", "qwen3_coder"])
def engine(request, tiny_dir, tmp_path_factory):
    directory = with_template(tiny_dir, tmp_path_factory.mktemp("tools") / "model", request.param)
    with Engine.load(directory) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def url(engine):
    with live(engine) as address:
        yield address


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_random_model_calls_as_it_must(url, choice):
    """It has never seen a tool: the grammar alone makes the call, and the parser reads it."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=WAIT_S) as client:
        fields = {"model": MODEL, "messages": HELLO, "max_tokens": 200, "temperature": 1, "seed": 3}
        fields |= {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
        whole = client.chat.completions.create(**fields).choices[0]
        assert whole.finish_reason == "tool_calls" and whole.message.content is None
        (call,) = whole.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "weather" and set(arguments) == {"city", "days"}
        assert len(arguments["city"]) <= 4 and 1 <= arguments["days"] <= 9
        chunks = list(client.chat.completions.create(**fields, stream=True))
        deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments


def test_strict_leaves_text_free_and_holds_a_call_to_its_schema(url, engine):
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    with httpx.Client(base_url=url) as client:
        assert ask(client, tools=[strict], max_tokens=20).json()["choices"][0]["message"]["content"]
    markup, vocabulary = Markup(engine.tokenizer), Vocabulary(engine.tokenizer, engine.model.vocab_size, engine.eos_ids)
    calling = Calling((WEATHER,), strict=frozenset({"weather"}))
    grammar = calls_grammar(markup, vocabulary, calling, "tools")

    def follows(text: str) -> tuple[bool, bool]:
        """Whether the grammar allows a text, and whether an answer may end there."""
        matcher = llguidance.LLMatcher(vocabulary.tokens, grammar)
        ids = engine.tokenizer.encode(text)
        return matcher.try_consume_tokens(ids) == len(ids), matcher.is_accepting()

    good = {
        "json_tools": '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "days": 2}}\n</tool_call>',
        "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
    }[markup.format]
    assert follows("any <tool text") == (True, True)
    assert follows(f"I look. {good} and {good}") == (True, True)
    assert follows(good[:-1])[1] is False
    assert follows(good.replace("Ulm", "Ulmer"))[0] is False
    assert follows(good.replace("2", "77"))[0] is follows(good.replace("weather", "whether"))[0] is False


def test_where_no_grammar_is_known_calls_cannot_be_enforced(tiny_dir, tmp_path):
    template = JSON_TOOLS.replace("tool_call.name", "<arg_key>")
    with Engine.load(with_template(tiny_dir, tmp_path / "model", template)) as engine, client_of(engine) as client:
        response = ask(client, tool_choice="required", **TOOLS)
        assert response.status_code == 400
        assert error_of(response)["param"] == "tool_choice" and "glm47" in error_of(response)["message"]
