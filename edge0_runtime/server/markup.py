"""What a model marks up in its answers: thinking and tool calls. Markers and parsers are mlx-lm's.

A parser reads what a model wrote, so whatever it raises or returns, the worst that happens is that the call stays text.
"""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edge0_runtime.libraries import TextStateMachine, TokenizerWrapper, make_text_state_machine, tool_parser
from edge0_runtime.server.exchange import Text, Thinking, ToolCall
from edge0_runtime.text import Decode, decoder

log = logging.getLogger("edge0_runtime.server")
MAX_CALLS = 128
MAX_ID_LENGTH = 64
Part = Text | Thinking | ToolCall


class Markup:
    """Of one model: what its tokenizer and its chat template know.

    Attributes:
        thinks: there are markers of thinking. tools: the template takes tools, and there is a parser for their calls.
        format: the name of that parser, e.g. `json_tools`; None without one. call_markers: around a call.
    """

    def __init__(self, tokenizer: Any) -> None:
        parser = tool_parser(tokenizer)
        self._template, self._parser = tokenizer.chat_template, parser
        self._plain = TokenizerWrapper(tokenizer)
        self._machine = self._calling = make_text_state_machine(self._plain)
        self.thinks: bool = self._plain.has_thinking
        self.tools = parser is not None and self.reads("tools")
        self.format = None if parser is None else parser.__name__.rpartition(".")[2]
        self.call_markers = ("", "") if parser is None else (parser.tool_call_start, parser.tool_call_end)
        if parser is not None:
            start, end = self.call_markers
            self._calling = make_text_state_machine(
                TokenizerWrapper(tokenizer, tool_call_start=start, tool_call_end=end)
            )
        markers = [self._plain.think_start, self._plain.think_end, *self.call_markers]
        special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        ids = {token for text in filter(None, markers) for token in tokenizer.encode(text, add_special_tokens=False)}
        self._decode = decoder(tokenizer, frozenset(ids & special))

    def reads(self, variable: str) -> bool:
        """Whether the chat template has a variable of that name."""
        template = self._template
        return isinstance(template, str) and re.search(rf"\b{re.escape(variable)}\b", template) is not None

    @property
    def think_end(self) -> tuple[int, ...]:
        """Ids of the marker that ends thinking."""
        return tuple(self._plain.think_end_tokens or ())

    def opens_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Whether an answer to this prompt begins in the midst of thinking."""
        if not self.thinks:
            return False
        start: int = self._plain.rfind_think_start(prompt_ids)
        end: int = self._plain.rfind_think_end(prompt_ids)
        return start > end

    def splitter(
        self, choice: int, prompt_ids: Sequence[int], tools: Sequence[Mapping[str, Any]], *, one_call: bool
    ) -> Splitter:
        """For one choice. Without tools a call is text; `one_call`: the choice has enough with one."""
        machine = self._calling if tools else self._machine
        state = machine.make_state("reasoning" if self.opens_thinking(prompt_ids) else "normal")
        return Splitter(choice, state, self._decode, self._parser, tools, one_call)


class Splitter:
    """Parts the text of one choice, as it comes.

    Attributes:
        decode: ids -> text in which the markers are. calls: how many calls have been given. enough: nothing more is wanted.
    """

    def __init__(
        self,
        choice: int,
        state: Any,
        decode: Decode,
        parser: Any,
        tools: Sequence[Mapping[str, Any]],
        one_call: bool,
    ) -> None:
        self._choice, self._parser, self._tools, self._one_call = choice, parser, list(tools), one_call
        self._names = {tool["function"]["name"] for tool in tools}
        self._state = state  # mlx-lm's
        self._before: str = state[0]  # its name: normal, reasoning, tool
        self._call = ""  # the text of a call that has begun
        self._trim = state[0] == "reasoning"  # the newlines that markup leaves
        self.decode, self.calls = decode, 0

    @property
    def thinks(self) -> bool:
        """Whether what comes next is thinking."""
        return self._before == "reasoning"

    @property
    def enough(self) -> bool:
        """Whether the choice may end here."""
        return self._one_call and self.calls > 0

    def add(self, text: str) -> list[Part]:
        """What a piece of final text completes."""
        self._state, segments = TextStateMachine.split(self._state, text)
        return [part for state, piece in segments for part in self._enter(state, piece)]

    def finish(self, cut: bool) -> list[Part]:
        """The rest. `cut`: the choice could have gone on, so an open call is none."""
        self._state, text, state = TextStateMachine.flush(self._state)
        parts = [*self._enter(state, text)]
        if self._before == "tool":
            parts += [self._text(self._parser.tool_call_start + self._call)] if cut else self._called("")
        return parts

    def _enter(self, state: str, piece: str) -> Iterator[Part]:
        """Text of the state that is now; the one before may have been a tool call, which is whole then."""
        if state != self._before:
            if self._before == "tool":
                yield from self._called(self._parser.tool_call_end)
            self._before, self._trim = state, True
        if self.enough:
            return
        if state == "tool":
            self._call += piece
            return
        if self._trim:
            piece = piece.lstrip("\n")
        if piece:
            self._trim = False
            yield Thinking(self._choice, piece) if state == "reasoning" else self._text(piece)

    def _text(self, text: str) -> Text:
        return Text(self._choice, text)

    def _called(self, end: str) -> list[Part]:
        text, self._call, self._before = self._call, "", "normal"
        calls = self._parsed(text)
        if not calls:
            return [self._text(self._parser.tool_call_start + text + end)]
        parts: list[Part] = []
        for name, arguments, own_id in calls[: 1 if self._one_call else None]:
            call_id = own_id or f"call_{uuid.uuid4().hex[:24]}"
            parts.append(ToolCall(self._choice, self.calls, call_id, name, arguments))
            self.calls += 1
        return parts

    def _parsed(self, text: str) -> list[tuple[str, str, str | None]]:
        """(name, arguments as JSON, the model's own id or None) of every call; [] where one isn't a call of a given tool."""
        try:
            found = self._parser.parse_tool_call(text, self._tools)
            return [self._checked(one) for one in (found if isinstance(found, list) else [found])[:MAX_CALLS]]
        except Exception as problem:  # whatever a parser makes of what a model wrote
            log.warning("a tool call of the model can't be parsed and stays text: %s", type(problem).__name__)
            return []

    def _checked(self, call: Any) -> tuple[str, str, str | None]:
        name, arguments, own_id = call["name"], call.get("arguments"), call.get("id")
        if name not in self._names or not isinstance(arguments or {}, dict):
            raise ValueError("no call of a tool that was given")
        text = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
        text.encode()  # JSON can spell halves of characters, which can't be sent
        short = isinstance(own_id, str) and 0 < len(own_id) <= MAX_ID_LENGTH
        return name, text, own_id if short else None
