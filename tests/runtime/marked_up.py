"""Models whose answers are marked up: a scripted one that thinks and calls tools, and chat templates for real ones."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.runtime.scripted_server import ByteTokenizer, FakeEngine

MARKERS = {"<think>": 300, "</think>": 301}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 4},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
ARGUMENTS = {"city": "Köln", "days": 2}

JSON_TOOLS = """
{%- for tool in tools or [] %}{{ tool.function.name }} {% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for tool_call in message.tool_calls or [] %}<tool_call>{{ tool_call.function.name }}
{{- tool_call.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}{# roles: tool; tool_call.name #}"""
XML_TOOLS = JSON_TOOLS.replace("tool_call.name", "<tool_call>\\n<function=")


class MarkedUpTokenizer(ByteTokenizer):
    """Bytes, and two tokens around thinking; the template tells tools, calls and whether to think."""

    chat_template = "role content tools tool_calls tool enable_thinking <tool_call> tool_call.name"

    def get_vocab(self) -> dict[str, int]:
        return super().get_vocab() | MARKERS

    def apply_chat_template(self, turns: Any, add_generation_prompt: bool, tokenize: bool, **variables: Any) -> str:
        tools = "".join(f"[{tool['function']['name']}]" for tool in variables.get("tools", ()))
        text = "".join(
            f"{turn['role']}:{turn.get('reasoning_content', '')}{turn['content']}{self._calls(turn)};" for turn in turns
        )
        return tools + text + ("<think>" if variables.get("enable_thinking") else "")

    def _calls(self, turn: Any) -> str:
        functions = [call["function"] for call in turn.get("tool_calls", ())]
        return "".join(f"({one['name']} {sorted(one['arguments'].items())})" for one in functions)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        before, marker, after = text.partition("<think>")
        return [*before.encode(), *([MARKERS[marker]] if marker else []), *after.encode()]


def scripted(text: str, **fields: Any) -> FakeEngine:
    """An engine that writes this text and ends."""
    return FakeEngine([*text.encode(), 256], tokenizer=MarkedUpTokenizer(), **({"context_length": 1000} | fields))


def with_template(source: Path, directory: Path, template: str) -> Path:
    """A copy of a model directory with another chat template."""
    shutil.copytree(source, directory)
    (directory / "chat_template.jinja").write_text(template)
    return directory
