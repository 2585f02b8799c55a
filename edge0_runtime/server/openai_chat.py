"""POST /v1/chat/completions: OpenAI's chat, to and from the server's own request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request, Response
from pydantic import Field, field_validator, model_validator

from edge0_runtime.server.conversation import Conversation, Effort, TemplateVariables
from edge0_runtime.server.exchange import (
    Choice,
    ChoiceEnd,
    Event,
    Finished,
    GenerationRequest,
    Progress,
    Text,
    Thinking,
    TokenLogprob,
    ToolCall,
)
from edge0_runtime.server.openai import ChunkWriter, progress, told_tokens, totals
from edge0_runtime.server.schema import Characters, Content, OpenAIRequest, Strict, only
from edge0_runtime.server.served import Served
from edge0_runtime.server.service import Service
from edge0_runtime.server.tools import MAX_TOOLS, TOOL_NAME, Calling, arguments_object, call_turn, calling

MAX_MESSAGES = 2048
MAX_TOP_LOGPROBS = 20


class FunctionCall(Strict):
    """A call that the assistant has made."""

    name: Annotated[str, Field(pattern=TOOL_NAME)]
    arguments: str = "{}"

    @field_validator("arguments")
    @classmethod
    def _is_an_object(cls, value: str) -> str:
        arguments_object(value)
        return value


class Call(Strict):
    """The same with its id."""

    id: Characters
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # streamed deltas have it, and clients send them back


class Message(Strict):
    """One turn. `developer` is OpenAI's newer name for `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    tool_calls: list[Call] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_call_id: Characters | None = None
    reasoning_content: Characters | None = None

    # No effect on an answer.
    name: str | None = None
    annotations: Annotated[Any, only([])] = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing")
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content is not None):
            raise ValueError("tool_calls and reasoning_content are the assistant's")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id belongs to messages of the role tool, and they need one")
        return self

    def for_template(self) -> dict[str, Any]:
        """The turn under the names that chat templates know."""
        turn: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
        }
        if self.tool_calls:
            turn["tool_calls"] = [
                call_turn(one.id, one.function.name, arguments_object(one.function.arguments))
                for one in self.tool_calls
            ]
        optional = {"tool_call_id": self.tool_call_id, "reasoning_content": self.reasoning_content}
        return turn | {name: value for name, value in optional.items() if value is not None}


class Function(Strict):
    """What a tool does, and the JSON schema of its arguments."""

    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: Characters | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class FunctionTool(Strict):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """The tool that must be called, within a choice."""

    name: str


class NamedChoice(Strict):
    """The choice of one tool."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Strict):
    """The schema of an answer. With or without `strict`, it is kept to."""

    name: Annotated[str, Field(max_length=64)] = "answer"
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class Format(Strict):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> Format:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type json_schema, and it needs one")
        return self

    def schema_of_answer(self) -> Any:
        """What JSON must follow; None: it is text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class ChatRequest(OpenAIRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    response_format: Format | None = None
    tools: list[FunctionTool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    continue_final_message: bool = False
    chat_template_kwargs: TemplateVariables = TemplateVariables()

    # No effect on an answer.
    metadata: dict[str, str] | None = None
    store: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    # Refused, unless set to what an answer is like anyway.
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    modalities: Annotated[Any, only(["text"])] = None
    service_tier: Annotated[Any, only("auto", "default")] = None
    verbosity: Annotated[Any, only("medium")] = None
    audio: Annotated[Any, only()] = None
    prediction: Annotated[Any, only()] = None
    web_search_options: Annotated[Any, only()] = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise ValueError(f"max_tokens {old} and max_completion_tokens {new} differ; send one of them")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message needs a last message of the assistant")
        if self.add_generation_prompt is not None and self.add_generation_prompt == self.continue_final_message:
            raise ValueError("add_generation_prompt must be the contrary of continue_final_message; leave it out")
        return self

    def request(self, served: Served) -> GenerationRequest:
        """As the server's own. Raises ApiError where this model can't answer it."""
        conversation = Conversation(
            turns=[message.for_template() for message in self.messages],
            calling=self._calling(),
            schema=None if self.response_format is None else self.response_format.schema_of_answer(),
            variables=self.chat_template_kwargs.given(),
            effort=self.reasoning_effort,
            continue_final=self.continue_final_message,
        )
        return conversation.request(
            served,
            sampling=self.sampling(served, self.max_completion_tokens or self.max_tokens),
            penalties=self.penalties(served),
            n=self.n,
            stops=tuple(self.stop),
            logprobs=served.logprobs(self.top_logprobs) if self.logprobs else None,
            progress=self.return_progress,
        )

    def _calling(self) -> Calling:
        functions, choice = [tool.function for tool in self.tools], self.tool_choice
        return calling(
            [(one.name, one.description, one.parameters, one.strict) for one in functions],
            choice=choice if isinstance(choice, str) else "required",
            named=None if isinstance(choice, str) else choice.function.name,
            parallel=self.parallel_tool_calls,
        )


def add_routes(app: FastAPI, service: Service) -> None:
    """The endpoint, on the app."""

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        served = service.model(body.model)
        wanted = await service.prepare(lambda: body.request(served))
        writer = ChatWriter(served.id, body.logprobs, body.stream_options.include_usage)
        return await service.answer(request, served, wanted, writer, stream=body.stream)


class ChatWriter(ChunkWriter):
    """OpenAI's chat completion, whole or in chunks: role, deltas, exactly one finish_reason a choice, usage where asked for."""

    def __init__(self, model: str, logprobs: bool, include_usage: bool) -> None:
        super().__init__("chatcmpl", model, "chat.completion.chunk", include_usage)
        self._logprobs = logprobs
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[Choice], end: Finished) -> dict[str, Any]:
        """One chat.completion."""
        listed = [
            {
                "index": number,
                "message": _message(choice),
                "logprobs": self._told(choice.tokens),
                "finish_reason": choice.reason,
            }
            for number, choice in enumerate(choices)
        ]
        return self._head.of("chat.completion") | {"choices": listed} | totals(end)

    def begin(self) -> Iterable[str]:
        """Nothing: the first chunk of a choice has its role."""
        return ()

    def write(self, event: Event) -> Iterator[str]:
        """Chunks for one event."""
        match event:
            case Progress(number):
                yield from self._delta(number, {}, extra=progress(event))
            case Text(number, text, tokens):
                yield from self._delta(number, {"content": text} if text else {}, tokens)
            case Thinking(number, text):
                yield from self._delta(number, {"reasoning_content": text})
            case ToolCall(number):
                for call in _call_deltas(event):
                    yield from self._delta(number, {"tool_calls": [call]})
            case ChoiceEnd(number, reason):
                yield from self._delta(number, {}, reason=reason)
            case Finished():
                yield from self._last(event)
            case _:
                pass

    def _delta(
        self,
        number: int,
        delta: dict[str, Any],
        tokens: Sequence[TokenLogprob] = (),
        reason: str | None = None,
        extra: dict[str, Any] | None = None,
    ) -> Iterator[str]:
        if number not in self._begun:
            self._begun.add(number)
            yield self._chunk(_choice(number, {"role": "assistant", "content": ""}))
        logprobs = self._told(tokens) if tokens else None
        yield self._chunk(_choice(number, delta, logprobs, reason), extra)

    def _told(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return {"content": told_tokens(tokens), "refusal": None} if self._logprobs else None


def _choice(number: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
    return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text}
    if choice.thinking:
        message["reasoning_content"] = choice.thinking
    if choice.calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
    return message


def _call_deltas(call: ToolCall) -> Iterator[dict[str, Any]]:
    """The call's name, then its arguments."""
    yield {"index": call.index, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
    yield {"index": call.index, "function": {"arguments": call.arguments}}
