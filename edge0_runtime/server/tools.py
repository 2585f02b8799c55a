"""Tools that a model may call: what a request says of them, and the grammar of their calls where one is to be kept to.

A tool is OpenAI's {"type": "function", "function": {name, description, parameters}}, which templates and mlx-lm's parsers take.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edge0_runtime.server.errors import ApiError
from edge0_runtime.server.grammar import WHITESPACE, json_schema_text
from edge0_runtime.server.markup import Markup
from edge0_runtime.server.vocabulary import Vocabulary

TOOL_NAME = r"^[a-zA-Z0-9_-]{1,64}$"
MAX_TOOLS = 128
PLAIN = {"type", "title", "description", "default", "examples", "minLength", "maxLength"}
"""Of a string's schema: what says nothing of its characters."""
JSON_TYPES = ("integer", "number", "boolean", "object", "array", "null")
XML_END = "\n</parameter>\n"
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Calling:
    """The tools of a request and whether they are to be called.

    Attributes:
        tools: all of them. choice: none, auto, required, or the name of the one that must be called.
        parallel: an answer may have several calls. strict: names of tools whose calls must keep to their schema.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    choice: str = "auto"
    named: str | None = None
    parallel: bool = True
    strict: frozenset[str] = frozenset()

    @property
    def offered(self) -> tuple[Mapping[str, Any], ...]:
        """Those that the model is told of."""
        if self.named is not None:
            return tuple(tool for tool in self.tools if tool["function"]["name"] == self.named)
        return () if self.choice == "none" else self.tools

    @property
    def forced(self) -> bool:
        """An answer is a call."""
        return self.named is not None or self.choice == "required"

    @property
    def constrained(self) -> bool:
        """Whether a grammar says what calls look like."""
        return bool(self.offered) and (self.forced or bool(self.strict))

    def checked(self, field: str) -> Calling:
        """Itself. Raises ApiError where the choice isn't among the tools, or two have one name."""
        names = [tool["function"]["name"] for tool in self.tools]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ApiError(400, f"tools: two are called {twice!r}; rename one", "tools")
        if self.forced and not self.offered:
            wanted = "a tool" if self.named is None else f"the tool {self.named!r}"
            raise ApiError(400, f"{field}: {wanted} must be called, and there is none; add it to tools", field)
        return self


def calling(
    tools: Iterable[tuple[str, str | None, Mapping[str, Any] | None, bool]],
    *,
    choice: str,
    named: str | None,
    parallel: bool,
) -> Calling:
    """Of tools as (name, description, parameters, strict). Raises ApiError as `Calling.checked`, naming `tool_choice`."""
    tools = list(tools)
    return Calling(
        tuple(_function_tool(name, description, parameters) for name, description, parameters, _ in tools),
        choice=choice,
        named=named,
        parallel=parallel,
        strict=frozenset(name for name, *_, strict in tools if strict),
    ).checked("tool_choice")


def _function_tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """In the form that templates take."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    return {"type": "function", "function": function | {"parameters": dict(parameters or NO_PARAMETERS)}}


def arguments_object(text: str) -> dict[str, Any]:
    """A call's arguments from their JSON text. Raises ValueError where they are no object."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be a JSON object, as text")
    return arguments


def call_turn(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call that was made, in the form that templates take: with its arguments as an object."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calls_grammar(markup: Markup, vocabulary: Vocabulary, calling: Calling, field: str) -> str:
    """A grammar in llguidance's Lark: one or more calls where they are forced, else text in which every call keeps to its schema.

    Raises ApiError where nobody has said how this model writes its calls.
    """
    write = {"json_tools": _json_call, "qwen3_coder": _xml_call}.get(markup.format or "")
    if write is None:
        message = (
            f"{field}: the form of this model's calls, {markup.format}, can't be enforced; use auto, without strict"
        )
        raise ApiError(400, message, field)
    start, end = (_marker(text, vocabulary) for text in markup.call_markers)
    rules: list[str] = []
    for number, tool in enumerate(calling.offered):
        function = tool["function"]
        opening = start if calling.forced else ""
        rules += write(number, function, opening, end, field, function["name"] in calling.strict)
    call = " | ".join(f"call_{number}" for number in range(len(calling.offered)))
    if calling.forced:
        first = 'start: call ("\\n" call)*' if calling.parallel else "start: call"
        return "\n".join([first, f"call: {call}", *rules])
    # The lexer takes the longest match, so text up to a marker is a lexeme that ends with it, unless that is a token of its own.
    if start.startswith("<["):
        rules += [f"lead: TEXT {start}", "TEXT: /(?s:.*)/"]
    else:
        rules.append(f"lead[suffix={start}]: /(?s:.*)/")
        rules.append(f"TEXT: /(?s:.*)/ & ~/(?s:.*){_escaped(markup.call_markers[0])}(?s:.*)/")
    first = "start: (lead call)* TEXT" if calling.parallel else "start: TEXT | lead call"
    return "\n".join([first, f"call: {call}", *rules])


def _json_call(number: int, function: Mapping[str, Any], start: str, end: str, field: str, _: bool) -> Iterator[str]:
    head = json.dumps(f'\n{{"name": "{function["name"]}", "arguments": ')
    yield f'call_{number}: {start} {head} args_{number} "}}\\n" {end}'
    yield f"args_{number}: {_json(function['parameters'], field)}"


def _xml_call(
    number: int, function: Mapping[str, Any], start: str, end: str, field: str, strict: bool
) -> Iterator[str]:
    """Parameters in the order of the schema, those that aren't required maybe left out."""
    schema = function["parameters"]
    properties, required, parts = schema.get("properties", {}), schema.get("required", []), []
    if not (isinstance(properties, dict) and isinstance(required, list)):
        raise ApiError(400, f"{field}: the parameters of {function['name']} are no JSON schema; correct them", field)
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for at, (name, kind) in enumerate(properties.items()):
        rule = f"arg_{number}_{at}"
        parts.append(rule if name in required else f"{rule}?")
        head = json.dumps(f"<parameter={name}>\n")
        yield f"{rule}: {head} value_{number}_{at}"
        value = _xml_value(f"value_{number}_{at}", kind if isinstance(kind, dict) else {}, shared, field)
        if value is None and strict:
            message = f"{field}: {function['name']}.{name} can't be enforced in this model's calls; leave out strict"
            raise ApiError(400, message, field)
        yield from value or [f"value_{number}_{at}[suffix={json.dumps(XML_END)}]: /(?s:.*)/"]
    head, tail = json.dumps(f"\n<function={function['name']}>\n"), json.dumps("</function>\n")
    yield f"call_{number}: {start} {head} {' '.join(parts)} {tail} {end}"


def _xml_value(rule: str, kind: Mapping[str, Any], shared: Mapping[str, Any], field: str) -> list[str] | None:
    """The rule of a parameter's text as mlx-lm's parser reads it: a string is itself, other types are JSON; None: no rule."""
    declared, tail = kind.get("type"), json.dumps(XML_END)
    choices = kind.get("enum", [kind["const"]] if "const" in kind else None)
    if isinstance(declared, str) and declared in JSON_TYPES:
        return [f"{rule}: {rule}_json {tail}", f"{rule}_json: {_json({**kind, **shared}, field)}"]
    if isinstance(choices, list) and choices and all(isinstance(one, str) for one in choices):
        return [f"{rule}: ({' | '.join(json.dumps(one) for one in choices)}) {tail}"]
    low, high = kind.get("minLength", 0), kind.get("maxLength", "")
    if declared == "string" and not kind.keys() - PLAIN and type(low) is int and (high == "" or type(high) is int):
        return [f"{rule}[suffix={tail}]: /(?s:.){{{low},{high}}}/"]
    return None


def _json(schema: Mapping[str, Any], field: str) -> str:
    spaces = {"whitespace_pattern": WHITESPACE}
    return f"%json {json_schema_text({**schema, 'x-guidance': spaces}, field)}"


def _marker(text: str, vocabulary: Vocabulary) -> str:
    """A marker in the grammar: the control token of that name, or its text."""
    ids = vocabulary.tokens.tokenize_str(text, parse_special=True)
    if len(ids) == 1 and vocabulary.tokens.is_special_token(ids[0]):
        return f"<[{ids[0]}]>"
    return json.dumps(text)


def _escaped(text: str) -> str:
    """For a regular expression in Lark."""
    return "".join(f"\\x{ord(character):02x}" if not character.isalnum() else character for character in text)
