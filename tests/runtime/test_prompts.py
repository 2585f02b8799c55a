"""Only the chat template writes control tokens; ordinary text has the ids that transformers gives it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_runtime.cli import main
from edge0_runtime.contract.prompts import chat_ids, control_texts, text_ids
from edge0_runtime.text import load_tokenizer
from tests.runtime.conftest import NANO_ASSETS

TOKENIZER = load_tokenizer(NANO_ASSETS, {"model_type": "qwen3_5_moe"})
START, END = TOKENIZER.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
CONTROL = set(TOKENIZER.convert_tokens_to_ids(list(control_texts(TOKENIZER))))


def turns(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


@given(st.lists(st.text(), min_size=1, max_size=4))
def test_an_ordinary_conversation_has_the_ids_of_transformers(contents):
    messages = turns(*contents)
    expected = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert chat_ids(TOKENIZER, messages) == expected


PIECES = st.sampled_from(
    ["<|im_end|>", "<|im_start|>", "<|pad|>", "<|im_", "end|>", "<", "|", "12+", "\n", "user\n", "\ufdd0", "é"]
)


@given(st.lists(st.lists(PIECES, max_size=8).map("".join), min_size=1, max_size=3))
def test_whatever_is_said_the_turns_are_those_of_the_template(contents):
    ids = chat_ids(TOKENIZER, turns(*contents))
    assert ids.count(START) == len(contents) + 1 and ids.count(END) == len(contents)
    said = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns(*contents))
    assert TOKENIZER.decode(ids) == said + "<|im_start|>assistant\n", "and not a character is lost"


@given(st.lists(PIECES, min_size=1, max_size=8).map("".join))
def test_raw_text_holds_no_control_token(text):
    ids = text_ids(TOKENIZER, text)
    assert not CONTROL & set(ids) and TOKENIZER.decode(ids) == text


@given(st.text(min_size=1))
def test_ordinary_raw_text_has_the_ids_of_transformers(text):
    assert text_ids(TOKENIZER, text) == TOKENIZER.encode(text)


def test_text_at_any_depth_of_a_message_is_text():
    class Tokenizer:
        added_tokens_decoder = TOKENIZER.added_tokens_decoder
        encode = TOKENIZER.encode

        def apply_chat_template(self, messages: list[Any], tools: list[Any], **_: Any) -> str:
            (call,) = messages[0]["tool_calls"]
            return f"<|im_start|>{call['function']['name']}{call['index']}{tools[0]['name']}"

    message = {"role": "assistant", "tool_calls": [{"index": 3, "function": {"name": "<|im_end|>"}}]}
    ids = chat_ids(Tokenizer(), [message], tools=[{"name": "<|pad|>"}])
    assert ids[0] == START and not CONTROL & set(ids[1:])
    assert TOKENIZER.decode(ids) == "<|im_start|><|im_end|>3<|pad|>"
    assert message["tool_calls"][0]["function"] == {"name": "<|im_end|>"}, "the caller's own are left as they are"


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_command_takes_a_control_token_for_text(tiny_dir: Path, capsys, command):
    assert main([command, str(tiny_dir), "--prompt", "1+1<|im_end|>", "--max-tokens", "1", "--json"]) == 0
    ids = json.loads(capsys.readouterr().out)["prompt_ids"]
    assert ids.count(END) == (0 if command == "generate" else 1)
