"""What a request of OpenAI's responses may hold, and the conversation that it is. Nothing is stored between requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from edge0_runtime.server.conversation import Conversation, Effort, Names
from edge0_runtime.server.exchange import GenerationRequest
from edge0_runtime.server.schema import Characters, Content, StreamOptions, Strict, only, sampling
from edge0_runtime.server.served import Served
from edge0_runtime.server.tools import MAX_TOOLS, TOOL_NAME, arguments_object, call_turn, calling

MAX_ITEMS = 2048
MAX_TOP_LOGPROBS = 20
NAMES = Names(turns="input", format="text.format", effort="reasoning.effort")
Status = Literal["in_progress", "completed", "incomplete"]


class MessageItem(Strict):
    """A turn, as clients write it or as an answer had it."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    # No effect on an answer.
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None

    def turn(self) -> dict[str, Any]:
        """As chat templates know it."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class CallItem(Strict):
    """A call that the assistant has made."""

    type: Literal["function_call"]
    call_id: Characters
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    arguments: str

    # No effect on an answer.
    id: str | None = None
    status: Status | None = None

    @field_validator("arguments")
    @classmethod
    def _is_an_object(cls, value: str) -> str:
        arguments_object(value)
        return value


class OutputItem(Strict):
    """What a tool gave."""

    type: Literal["function_call_output"]
    call_id: Characters
    output: Content

    # No effect on an answer.
    id: str | None = None
    status: Status | None = None


class ThoughtPart(Strict):
    """A piece of thinking."""

    type: Literal["reasoning_text"]
    text: Characters


class ReasoningItem(Strict):
    """What the assistant thought before what follows it."""

    type: Literal["reasoning"]
    content: list[ThoughtPart] = Field(default_factory=list)
    summary: Annotated[Any, only([])] = None
    encrypted_content: Annotated[Any, only("")] = None

    # No effect on an answer.
    id: str | None = None
    status: Status | None = None


def _kind(value: Any) -> Any:
    """Messages may come without a type."""
    return value.get("type") or "message" if isinstance(value, dict) else getattr(value, "type", None)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]
Items = Annotated[
    list[Item], BeforeValidator(lambda value: [{"role": "user", "content": value}] if isinstance(value, str) else value)
]


class FunctionTool(Strict):
    """A tool of the client's; OpenAI's own ones, which run on their side, are refused by their type."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: Characters | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    defer_loading: Annotated[Any, only(False)] = None


class NamedChoice(Strict):
    """The choice of one tool."""

    type: Literal["function"]
    name: str


class Format(Strict):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Annotated[str | None, Field(max_length=64)] = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> Format:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema belongs to the type json_schema, and it needs one")
        return self

    def schema_of_answer(self) -> Any:
        """What JSON must follow; None: it is text."""
        return {"type": "object"} if self.type == "json_object" else self.schema_


class TextConfig(Strict):
    """What the text is like."""

    format: Format = Format()
    verbosity: Annotated[Any, only("medium")] = None


class Reasoning(Strict):
    """How much to think."""

    effort: Effort | None = None
    summary: Annotated[Any, only()] = None
    generate_summary: Annotated[Any, only()] = None


class ResponsesRequest(Strict):
    """Body of POST /v1/responses."""

    model: str | None = None
    input: Annotated[Items, Field(min_length=1, max_length=MAX_ITEMS)]
    instructions: Characters | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    tools: list[FunctionTool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: Reasoning = Reasoning()
    include: list[Literal["message.output_text.logprobs"]] = Field(default_factory=list)
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    # No effect on an answer.
    metadata: dict[str, str] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    # Refused, unless set to what an answer is like anyway.
    store: Annotated[Any, only(False)] = None
    background: Annotated[Any, only(False)] = None
    truncation: Annotated[Any, only("disabled")] = None
    service_tier: Annotated[Any, only("auto", "default")] = None
    previous_response_id: Annotated[Any, only()] = None
    conversation: Annotated[Any, only()] = None
    prompt: Annotated[Any, only()] = None
    max_tool_calls: Annotated[Any, only()] = None
    context_management: Annotated[Any, only()] = None

    @property
    def tells_logprobs(self) -> bool:
        """Whether log-probabilities are asked for, in either way."""
        return bool(self.include) or self.top_logprobs > 0

    def request(self, served: Served) -> GenerationRequest:
        """As the server's own. Raises ApiError where this model can't answer it."""
        choice = self.tool_choice
        conversation = Conversation(
            turns=list(self._turns()),
            calling=calling(
                [(tool.name, tool.description, tool.parameters, tool.strict) for tool in self.tools],
                choice=choice if isinstance(choice, str) else "required",
                named=None if isinstance(choice, str) else choice.name,
                parallel=self.parallel_tool_calls,
            ),
            schema=self.text.format.schema_of_answer(),
            effort=self.reasoning.effort,
            names=NAMES,
        )
        chosen = {"temperature": self.temperature, "top_p": self.top_p, "top_k": None, "min_p": None}
        return conversation.request(
            served,
            sampling=sampling(served, self.max_output_tokens, None, chosen),
            logprobs=served.logprobs(self.top_logprobs) if self.tells_logprobs else None,
        )

    def _turns(self) -> Iterator[dict[str, Any]]:
        """As chat templates know them: thinking, text and calls that follow each other are one turn of the assistant."""
        if self.instructions is not None:
            yield {"role": "system", "content": self.instructions}
        turn: dict[str, Any] = {}
        for item in self.input:
            own = _assistants(item)
            if turn and (own is None or _begins_anew(turn, own)):
                yield {"role": "assistant", "content": ""} | turn
                turn = {}
            if isinstance(item, OutputItem):
                yield {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
            elif own is None and isinstance(item, MessageItem):
                yield item.turn()
            elif own is not None:
                calls = [*turn.get("tool_calls", []), *own.get("tool_calls", [])]
                turn |= own | ({"tool_calls": calls} if calls else {})
        if turn:
            yield {"role": "assistant", "content": ""} | turn


def _assistants(item: MessageItem | CallItem | OutputItem | ReasoningItem) -> dict[str, Any] | None:
    """What an item adds to a turn of the assistant; None where it isn't the assistant's."""
    if isinstance(item, CallItem):
        return {"tool_calls": [call_turn(item.call_id, item.name, arguments_object(item.arguments))]}
    if isinstance(item, ReasoningItem):
        return {"reasoning_content": "".join(part.text for part in item.content)}
    if isinstance(item, MessageItem) and item.role == "assistant":
        return {"content": item.content}
    return None


def _begins_anew(turn: dict[str, Any], own: dict[str, Any]) -> bool:
    """Within one turn come thinking, text, calls, in this order."""
    order = ("reasoning_content", "content", "tool_calls")
    (added,) = own
    return added != "tool_calls" and any(name in turn for name in order[order.index(added) :])
