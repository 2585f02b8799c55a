"""From a row, in the forms that public datasets have, to a `Prompt`: a conversation that the chat template takes as it is."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edge0_runtime.contract.files import strict_json, unquoted

COLUMNS = ("messages", "conversations", "prompt")
"""Where a row's conversation, or its text, is looked for, in this order."""
SHAREGPT = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool", "function_response": "tool",
}  # fmt: skip
"""ShareGPT's names of the roles, in `from`; its others are called as everywhere."""


class Refused(Exception):
    """Why a row makes no prompt, in words that many rows may share."""


@dataclass(frozen=True)
class Prompt:
    """A conversation up to and including the last user turn, and the tools that may be called.

    `answer` is empty when nothing can be checked.
    """

    messages: tuple[dict[str, Any], ...]
    task: str = ""
    answer: str = ""
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def text(self) -> str:
        """All that the model may see of it: what tells prompts apart, and train from held-out.

        The order of fields is the file format's, so it does not count; role and content come first, as they always have.
        """
        turns = [{"role": turn["role"], "content": turn["content"], **_sorted(turn)} for turn in self.messages]
        return json.dumps([turns, _sorted(list(self.tools))] if self.tools else turns, ensure_ascii=False)


def read_prompt(row: Any, column: str = "") -> tuple[Prompt, list[str]]:
    """The prompt of a row, and the names of its fields that are passed over.

    Args:
        column: where the conversation is; empty: the first of `COLUMNS` that is there.

    Raises Refused: there is none in it, or what is there has another form.
    """
    if not isinstance(row, dict):
        raise Refused("a row that is no object")
    found = next((row[name] for name in ([column] if column else COLUMNS) if row.get(name) is not None), None)
    if isinstance(found, str) and found.strip():
        found = [{"role": "user", "content": found}]
    if not isinstance(found, list) or not found:
        raise Refused("no messages")
    messages = [_message(message) for message in found]
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise Refused("no user turn")
    system = row.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
        users[-1] += 1
    passed_over = [name for name in ("task", "answer") if isinstance(row.get(name), (list, dict))]
    prompt = Prompt(
        tuple(messages[: users[-1] + 1]), _text(row.get("task")), _text(row.get("answer")), _tools(row.get("tools"))
    )
    try:
        (prompt.text + prompt.task + prompt.answer).encode()
    except UnicodeEncodeError:
        raise Refused("text that is no Unicode (half a surrogate pair)") from None
    return prompt, passed_over


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _sorted(value[name]) for name in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def _message(message: Any) -> dict[str, Any]:
    """Role, content as one text, and every other field that says something."""
    if not isinstance(message, dict):
        raise Refused("a message that is no object")
    message = dict(message)
    if "role" not in message and "from" in message:
        role = message.pop("from")
        message["role"] = SHAREGPT.get(role, role) if isinstance(role, str) else role
        message.setdefault("content", message.pop("value", None))
    role, content = message.pop("role", None), message.pop("content", None)
    others = {name: value for name, value in message.items() if not _says_nothing(value)}
    if "tool_calls" in others:
        others["tool_calls"] = _tool_calls(others["tool_calls"])
        content = "" if content is None else content
    if role is None or role == "" or content is None:
        raise Refused("a message without role or content")
    if not isinstance(role, str):
        raise Refused("a role that is no text")
    return {"role": role, "content": _content(content), **others}


def _says_nothing(value: Any) -> bool:
    return value is None or value == "" or value == [] or value == {}


def _content(content: Any) -> str:
    """Text, or the text of parts ({"type": "text", "text": ...}) one after the other."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused("content that is no text")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else None
            raise Refused(
                f"content with parts that are no text{f' ({unquoted(kind)})' if isinstance(kind, str) else ''}"
            )
        texts.append(text)
    return "".join(texts)


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    """Calls with their arguments as an object, as templates want them (OpenAI's own format has them as JSON in a text)."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise Refused("tool_calls that are no list of calls")
    return [
        _parsed(call) | {"function": _parsed(call["function"])} if "function" in call else _parsed(call)
        for call in calls
    ]


def _parsed(function: Any) -> dict[str, Any]:
    if not isinstance(function, dict):
        raise Refused("tool_calls that are no list of calls")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return function
    try:
        return function | {"arguments": strict_json(arguments)}
    except ValueError:
        raise Refused("tool_calls whose arguments are no JSON") from None


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """Descriptions of tools: a list, or one as JSON in a text."""
    if isinstance(tools, str) and tools:
        try:
            tools = strict_json(tools)
        except ValueError:
            raise Refused("tools that are no JSON") from None
    if _says_nothing(tools):
        return ()
    if not isinstance(tools, Sequence) or not all(isinstance(tool, dict) for tool in tools):
        raise Refused("tools that are no list of descriptions")
    return tuple(tools)


def _text(value: Any) -> str:
    """A cell as text: 0 and false are answers too; what is empty, or no single value, is none."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return ""
    return json.dumps(value) if isinstance(value, (bool, int, float)) else ""
