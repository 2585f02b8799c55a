"""A conversation: its turns, how they are kept in a file, and how an answer fits the terminal's lines."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import atomic_replace, read_json, shown

ROLES = ("system", "user", "assistant")


class Conversation:
    """What was said.

    Attributes:
        system: the system prompt, None without one. turns: user's and assistant's by turns, as a chat template takes them.
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.turns: list[dict[str, str]] = []

    def messages(self, question: str | None = None) -> list[dict[str, str]]:
        """For the chat template: the system prompt, the turns and a question that is asked now."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        asked = [] if question is None else [{"role": "user", "content": question}]
        return [*system, *self.turns, *asked]

    def add(self, question: str, answer: str) -> None:
        """Both have been said."""
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def undo(self) -> str | None:
        """Forget the last question and its answer; returns the question, None if there is none."""
        while self.turns:
            turn = self.turns.pop()
            if turn["role"] == "user":
                return turn["content"]
        return None

    def save(self, path: Path, model: str) -> None:
        """Write it as JSON, with the model's name. Raises Edge0Error where another file lies there, or none can be written."""
        if path.exists():
            try:
                read_messages(path)
            except Edge0Error as problem:
                raise Edge0Error(f"{path}: lies there and is no conversation; choose another name") from problem
        text = json.dumps({"model": model, "messages": self.messages()}, ensure_ascii=False, indent=2) + "\n"
        data = text.encode("utf-8")
        with atomic_replace(path, needed_bytes=len(data)) as temporary:
            temporary.write_bytes(data)

    def load(self, path: Path) -> None:
        """Go on with a saved one, in place of what was said. Raises Edge0Error where the file holds none."""
        messages = read_messages(path)
        system = [turn["content"] for turn in messages if turn["role"] == "system"]
        self.system = "\n\n".join(system) if system else None
        self.turns = [turn for turn in messages if turn["role"] != "system"]


def read_messages(path: Path) -> list[dict[str, str]]:
    """The messages of a file that `save` wrote, or of any JSON object with OpenAI's `messages` of plain text.

    Raises Edge0Error naming file, message and what it must be.
    """
    messages = read_json(path, "give a file that /save wrote").get("messages")
    if not isinstance(messages, list):
        raise Edge0Error(f"{path}: messages: {shown(messages)} must be a list; give a file that /save wrote")
    return [_message(path, number, message) for number, message in enumerate(messages)]


def _message(path: Path, number: int, message: Any) -> dict[str, str]:
    fields = message if isinstance(message, Mapping) else {}
    role, content = fields.get("role"), fields.get("content")
    if role not in ROLES or not isinstance(content, str):
        raise Edge0Error(
            f"{path}: messages[{number}]: {shown(message)} must have a role of {', '.join(ROLES)} and a content that is text"
        )
    return {"role": role, "content": content}


class Wrapping:
    """Breaks lines of a text that comes in pieces between words, so that none is wider than `columns`.

    A word that is wider than a line is left to the terminal, and what is indented or stands between ``` stays as it is: it may
    be code, and is copied. Control characters, which a terminal would obey, are shown escaped.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._line = ""  # what stands on the terminal's line
        self._word = ""  # what follows it and isn't shown yet: spaces, then characters
        self._code = False

    def add(self, text: str) -> str:
        """What to print now."""
        out = ""
        for character in text:
            if character == "\n":
                out += self.finish() + "\n"
                self._code ^= self._line.lstrip().startswith("```")
                self._line = ""
            else:
                if character == " " and not self._word.endswith(" "):
                    out += self.finish()
                obeyed = unicodedata.category(character) == "Cc" and character != "\t"
                self._word += ascii(character)[1:-1] if obeyed else character
        return out

    def finish(self) -> str:
        """The word that is held back."""
        word, self._word = self._word, ""
        code = self._code or (self._line or word).startswith((" ", "\t"))
        if code or not self._line or len(self._line) + len(word) <= self._columns:
            self._line += word
            return word
        self._line = word.lstrip(" ")
        return f"\n{self._line}"
