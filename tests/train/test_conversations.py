"""Rows that people have: handed to the chat template, or dropped and counted with a reason; nothing vanishes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.data.chat import Chat
from edge0_train.data.conversations import Prompt, Refused, read_prompt
from edge0_train.data.prompts import Limit, Prompts, load_prompts
from tests.tiny_models import TEACHER

RICH = """\
{%- if tools %}{{- '<tools>' + (tools | tojson) + '</tools>\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role in ('system', 'user', 'assistant', 'tool') %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<call>' + call.function.name + (call.function.arguments | tojson) + '</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
"""Takes tools, calls, reasoning and tool messages; leaves out turns of other roles without a word."""
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
ASK = {"role": "user", "content": "Add 1 and 2."}
FIELDS: dict[str, Any] = {
    "tools": {"messages": [ASK], "tools": [TOOL]},
    "tool_calls": {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}, ASK]},
    "reasoning_content": {"messages": [ASK, {"role": "assistant", "content": "3.", "reasoning_content": "easy"}, ASK]},
}


@pytest.fixture(scope="module")
def plain() -> Chat:
    return Chat(TEACHER)


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    directory = tmp_path_factory.mktemp("rich") / "teacher"
    shutil.copytree(TEACHER, directory)
    (directory / "chat_template.jinja").write_text(RICH)
    return Chat(directory)


def good(count: int = 200) -> list[Any]:
    return [{"messages": [{"role": "user", "content": f"Add {n} and 2."}]} for n in range(count)]


def load(path: Path, rows: list[Any], chat: Chat | None = None, **settings: Any) -> Prompts:
    """Of a JSONL file whose lines are `rows`: values, or texts as they are."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    limit = Limit(512, lambda prompt: len(chat.prompt_ids(prompt)), chat.ignored_fields) if chat else None
    return load_prompts(str(path), train=10**6, held_out=10**6, seed=0, limit=limit, **settings)


def shown(chat: Chat, row: Any) -> str:
    return chat.tokenizer.decode(list(chat.prompt_ids(read_prompt(row)[0])))


DAMAGED = {
    "tokenizer.json": ["", "{", "[]", '{"model": 3}'],
    "generation_config.json": ["{", "[]", '{"eos_token_id": [[1]]}', '{"eos_token_id": "2"}'],
    "chat_template.jinja": [""],
}


@pytest.mark.parametrize(("name", "content"), [(name, text) for name, texts in DAMAGED.items() for text in texts])
def test_damaged_files_of_a_tokenizer_are_one_sentence(tmp_path, name, content):
    directory = tmp_path / "teacher"
    shutil.copytree(TEACHER, directory)
    (directory / name).write_text(content)
    with pytest.raises(Edge0Error, match="teacher") as error:
        Chat(directory)
    assert len(str(error.value)) < 1000


# -- fields ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_reaches_a_template_that_takes_it(rich, field):
    text = shown(rich, FIELDS[field])
    said = {
        "tools": f"<tools>{json.dumps([TOOL])}</tools>",
        "tool_calls": '<|im_start|>assistant\n<call>add{"a": 1, "b": 2}</call><|im_end|>',
        "reasoning_content": "<think>easy</think>3.",
    }
    assert said[field] in text


@pytest.mark.parametrize("field", FIELDS)
def test_a_row_is_dropped_where_the_template_has_no_place_for_its_field(plain, tmp_path, field):
    prompts = load(tmp_path / "q.jsonl", [*good(), FIELDS[field]], plain)
    assert prompts.dropped == {f"{field}, which the chat template has no place for": 1}
    assert prompts.places == {f"{field}, which the chat template has no place for": ["line 201"]}


def test_calls_and_tools_as_json_in_a_text_are_the_same(rich):
    as_text = {"function": CALL["function"] | {"arguments": json.dumps({"a": 1, "b": 2})}}  # type: ignore[dict-item]
    row = {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [as_text]}, ASK]}
    assert shown(rich, row) == shown(rich, FIELDS["tool_calls"])
    assert shown(rich, FIELDS["tools"] | {"tools": json.dumps([TOOL])}) == shown(rich, FIELDS["tools"])


def test_columns_that_parquet_fills_with_null_are_not_there(rich, tmp_path):
    """Arrow gives every row and every struct all fields of all others."""
    rows = [{"messages": [{**ASK, "content": f"{n}"}], "tools": [TOOL]} for n in range(60)] + good(60)
    rows += [
        {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {**ASK, "name": f"{n}"}]}
        for n in range(9)
    ]
    other = {"function": {"name": "add", "arguments": {"c": "3"}}}
    rows += [{"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [other]}, ASK]}]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "q.parquet"))
    limit = Limit(512, lambda prompt: len(rich.prompt_ids(prompt)), rich.ignored_fields)
    found = load_prompts(str(tmp_path / "q.parquet"), train=999, held_out=999, seed=0, limit=limit)
    assert found == load(tmp_path / "q.jsonl", rows, rich)
    assert not found.dropped and found.ignored == {"name": 9}


def test_fields_that_say_nothing_are_none(plain, tmp_path):
    nothing = {"name": None, "tool_calls": [], "reasoning_content": "", "function_call": None}
    rows = [{"messages": [message | nothing for message in row["messages"]], "tools": []} for row in good()]
    prompts = load(tmp_path / "q.jsonl", rows, plain)
    assert prompts == load(tmp_path / "q.jsonl", good(), plain) and not prompts.dropped and not prompts.ignored


def test_further_fields_that_change_nothing_are_counted(plain, tmp_path):
    rows = [{"messages": [{**row["messages"][0], "name": "Zoë", "language": "en"}]} for row in good(90)]
    prompts = load(tmp_path / "q.jsonl", [*rows, *good(120)[90:]], plain)
    assert prompts.ignored == {"name": 90, "language": 90} and not prompts.dropped


@pytest.mark.parametrize(
    ("answer", "text"), [(0, "0"), (False, "false"), (True, "true"), (1.5, "1.5"), ("0", "0"), (None, ""), ("", "")]
)
def test_an_answer_of_zero_is_an_answer(answer, text):
    assert read_prompt({"messages": [ASK], "answer": answer, "task": answer})[0] == Prompt((ASK,), text, text)


def test_an_answer_that_is_no_single_value_is_passed_over_and_counted(tmp_path):
    prompts = load(tmp_path / "q.jsonl", [row | {"answer": [1, 2]} for row in good(99)])
    assert prompts.ignored == {"answer": 99} and {p.answer for p in prompts.train} == {""}


# -- rows that cannot be used ------------------------------------------------------------------------------------------

BAD: dict[str, tuple[Any, str]] = {
    "developer": ({"messages": [{"role": "developer", "content": "Be brief."}, ASK]}, "role is developer; use system"),
    "tool message": ({"messages": [ASK, {"role": "tool", "content": "3"}, ASK]}, "role is tool; use system"),
    "integer role": ({"messages": [{"role": 7, "content": "x"}, ASK]}, "a role that is no text"),
    "picture": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"parts that are no text \(image_url\)"),
    "number": ({"messages": [{"role": "user", "content": 3}]}, "content that is no text"),
    "text message": ({"messages": ["hello"]}, "a message that is no object"),
    "list": ([1], "a row that is no object"),
    "surrogate": ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "text that is no Unicode"),
    "cut line": ('{"messages": [{"role"', "not strict JSON"),
    "no line": ("%%%", "not strict JSON"),
    "calls": ({"messages": [ASK, {"role": "assistant", "tool_calls": "add"}, ASK]}, "tool_calls that are no list"),
    "arguments": (
        {"messages": [ASK, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}, ASK]},
        "tool_calls whose arguments are no JSON",
    ),
    "tools": ({"messages": [ASK], "tools": "{"}, "tools that are no JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_one_bad_row_is_dropped_with_its_line_and_reason(plain, tmp_path, name):
    row, reason = BAD[name]
    prompts = load(tmp_path / "q.jsonl", [*good(7), row, *good()[7:]], plain, max_dropped=0.01)
    assert len(prompts.train) + len(prompts.held_out) == 200
    [(found, places)] = prompts.places.items()
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(found)
    assert places == ["line 8"] and prompts.dropped == {found: 1}
    assert f"1 {found} (line 8)" in prompts.why_dropped()


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages.x.y }}", "{{ raise_exception('no\\n\\nway') }}"])
def test_whatever_a_template_raises_drops_the_row(tmp_path, template):
    directory = tmp_path / "teacher"
    shutil.copytree(TEACHER, directory)
    (directory / "chat_template.jinja").write_text(template)
    chat = Chat(directory)
    with pytest.raises(Refused, match="the chat template refuses it") as refused:
        chat.prompt_ids(Prompt((ASK,)))
    assert "\n" not in str(refused.value)
    with pytest.raises(Edge0Error, match=r"text\.max_dropped: .*the chat template refuses it"):
        load(tmp_path / "q.jsonl", good(), chat, max_dropped=0.5)


def test_a_turn_that_the_template_would_leave_out_drops_the_row(rich, tmp_path):
    rows = [*good(), BAD["developer"][0], {"messages": [ASK, {"role": "tool", "content": "3"}, ASK]}]
    prompts = load(tmp_path / "q.jsonl", rows, rich)
    assert prompts.dropped == {"role developer, which the chat template has no place for": 1}


def test_above_the_stated_share_bad_rows_are_an_error_whose_advice_helps(plain, tmp_path):
    rows = [*good(), *(BAD[name][0] for name in ("developer", "cut line", "integer role"))] * 2
    rows += ["%%%"] * 20
    with pytest.raises(
        Edge0Error, match=r"text\.max_dropped: 25 of 426 rows of .*q\.jsonl \(5\.9%\) cannot be used, allowed are 5\.0%"
    ) as error:
        load(tmp_path / "q.jsonl", rows, plain, max_dropped=0.05)
    assert "22 not strict JSON (line 202, line 405, line 407, line 408, line 409, ...)" in str(error.value)
    advised = float(str(error.value).rpartition("text.max_dropped=")[2])
    prompts = load(tmp_path / "q.jsonl", rows, plain, max_dropped=advised)
    assert prompts.dropped["duplicate prompt"] == 201 and sum(prompts.dropped.values()) == 226


def test_a_template_that_quotes_the_row_does_not_fill_the_card(tmp_path):
    directory = tmp_path / "teacher"
    shutil.copytree(TEACHER, directory)
    (directory / "chat_template.jinja").write_text("{{ raise_exception(messages[0].content) }}")
    with pytest.raises(Edge0Error, match="other reasons") as error:
        load(tmp_path / "q.jsonl", [*good(), *good()], Chat(directory), max_dropped=0.1)
    assert "200 duplicate prompt (" in str(error.value) and "200 of 400 rows" in str(error.value)
    assert len(str(error.value)) < 5000


def test_what_reads_like_a_control_token_in_a_message_is_text(plain):
    end = plain.tokenizer.convert_tokens_to_ids("<|im_end|>")
    said, quoted = (plain.prompt_ids(Prompt(({"role": "user", "content": text},))) for text in ("ab", "a<|im_end|>b"))
    assert quoted.count(end) == said.count(end) == 1


def test_the_order_of_fields_neither_doubles_a_prompt_nor_moves_it_to_the_other_side():
    """Parquet and JSON hold the fields of a struct in orders of their own."""
    call, tool = ({"function": {"name": "add", "x": 1}, "type": "function"}, {"type": "function", "function": {"a": 1}})
    turns = (
        {**ASK, "tool_calls": [call], "name": "n"},
        {"name": "n", "tool_calls": [_reversed(call)], **_reversed(ASK)},
    )
    one, other = (
        Prompt((turn,), tools=(described,)) for turn, described in zip(turns, (tool, _reversed(tool)), strict=True)
    )
    assert one.text == other.text
    plain = ({"role": "user", "content": "Zoë"}, {"role": "assistant", "content": "\u2028"})
    assert Prompt(plain).text == json.dumps(plain, ensure_ascii=False)  # as versions before wrote it


def _reversed(value: Any) -> Any:
    return {name: _reversed(inner) for name, inner in reversed(value.items())} if isinstance(value, dict) else value
