"""What a request of Anthropic's messages may hold, and the conversation that it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from edge0_runtime.server.conversation import Conversation, Effort, Names
from edge0_runtime.server.exchange import GenerationRequest
from edge0_runtime.server.schema import Characters, Content, Stop, Strict, only, sampling
from edge0_runtime.server.served import Served
from edge0_runtime.server.tools import MAX_TOOLS, TOOL_NAME, call_turn, calling

MAX_MESSAGES = 2048
NAMES = Names(format="output_config.format", variables="thinking", effort="thinking")


class _Part(Strict):
    """What every part may carry: where a cache may begin is a hint, and every prefix is as good here."""

    cache_control: Any = None


class TextBlock(_Part):
    """Text of either side."""

    type: Literal["text"]
    text: Characters
    citations: Annotated[Any, only([])] = None


class ToolUse(_Part):
    """A call that the assistant has made."""

    type: Literal["tool_use"]
    id: Characters
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    input: dict[str, Any]
    caller: Any = None


class ToolResult(_Part):
    """What a tool gave, or that it failed."""

    type: Literal["tool_result"]
    tool_use_id: Characters
    content: Content = ""
    is_error: bool = False


class ThinkingBlock(_Part):
    """What the assistant thought; nothing here signs it."""

    type: Literal["thinking"]
    thinking: Characters
    signature: str = ""


Block = Annotated[TextBlock | ToolUse | ToolResult | ThinkingBlock, Field(discriminator="type")]
Blocks = Annotated[
    list[Block], BeforeValidator(lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value)
]


class Message(Strict):
    """One turn."""

    role: Literal["user", "assistant"]
    content: Annotated[Blocks, Field(min_length=1)]

    @model_validator(mode="after")
    def _fits_its_role(self) -> Message:
        wrong = ("tool_use", "thinking") if self.role == "user" else ("tool_result",)
        for block in self.content:
            if block.type in wrong:
                raise ValueError(f"a {block.type} block is none of the role {self.role}")
        return self

    def turns(self) -> Iterator[dict[str, Any]]:
        """As chat templates know them: results of tools are turns of their own, before the user's text."""
        text = "".join(block.text for block in self.content if isinstance(block, TextBlock))
        if self.role == "assistant":
            turn: dict[str, Any] = {"role": "assistant", "content": text}
            calls = [block for block in self.content if isinstance(block, ToolUse)]
            thought = "".join(block.thinking for block in self.content if isinstance(block, ThinkingBlock))
            if calls:
                turn["tool_calls"] = [call_turn(block.id, block.name, block.input) for block in calls]
            yield turn | ({"reasoning_content": thought} if thought else {})
            return
        results = [block for block in self.content if isinstance(block, ToolResult)]
        for block in results:
            given = f"Error: {block.content}" if block.is_error else block.content
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": given}
        if text or not results:
            yield {"role": "user", "content": text}


class Tool(_Part):
    """A tool of the client's; Anthropic's own ones, which run on their side, are refused by their type."""

    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: Characters | None = None
    input_schema: dict[str, Any]
    strict: bool = False
    eager_input_streaming: bool | None = None  # arguments come when they are whole, which is soon enough for either


class ToolChoice(Strict):
    """Whether tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _names_a_tool(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name belongs to the type tool, and it needs one")
        return self


class ThinkingMode(Strict):
    """Whether to think before answering; for how long is the model's to say."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int | None, Field(ge=1)] = None
    display: Annotated[Any, only("summarized")] = None


class JsonFormat(Strict):
    """The form of an answer."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    """What an answer is like."""

    format: JsonFormat | None = None
    effort: Annotated[Any, only("high")] = None


class CountRequest(Strict):
    """Body of POST /v1/messages/count_tokens: what a prompt is made of."""

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Blocks | None = None
    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: ThinkingMode | None = None
    output_config: OutputConfig = OutputConfig()

    # Refused, unless set to what an answer is like anyway.
    cache_control: Any = None
    context_management: Annotated[Any, only()] = None
    mcp_servers: Annotated[Any, only([])] = None
    container: Annotated[Any, only()] = None
    diagnostics: Annotated[Any, only()] = None
    speed: Annotated[Any, only("standard")] = None

    def conversation(self) -> Conversation:
        """What is to be answered. Raises ApiError where its tools don't fit together."""
        turns = [turn for message in self.messages for turn in message.turns()]
        if self.system:
            text = "".join(block.text for block in self.system if isinstance(block, TextBlock))
            turns.insert(0, {"role": "system", "content": text})
        choice = {"any": "required", "tool": "required"}.get(self.tool_choice.type, self.tool_choice.type)
        output = self.output_config.format
        effort: Effort | None = None
        if self.thinking is not None and self.thinking.type != "adaptive":
            effort = "none" if self.thinking.type == "disabled" else "medium"
        return Conversation(
            turns=turns,
            calling=calling(
                [(tool.name, tool.description, tool.input_schema, tool.strict) for tool in self.tools],
                choice=choice,
                named=self.tool_choice.name,
                parallel=not self.tool_choice.disable_parallel_tool_use,
            ),
            schema=None if output is None else output.schema_,
            effort=effort,
            continue_final=self.messages[-1].role == "assistant",
            names=NAMES,
        )


class MessagesRequest(CountRequest):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    temperature: Annotated[float | None, Field(ge=0, le=1)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0)] = None
    stop_sequences: Stop = Field(default_factory=list, max_length=16)
    stream: bool = False

    # No effect on an answer.
    metadata: dict[str, str] | None = None
    service_tier: Annotated[Any, only("auto", "standard_only")] = None
    inference_geo: Annotated[Any, only()] = None

    def request(self, served: Served) -> GenerationRequest:
        """As the server's own. Raises ApiError where this model can't answer it."""
        chosen = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": None}
        return self.conversation().request(
            served, sampling=sampling(served, self.max_tokens, None, chosen), stops=tuple(self.stop_sequences)
        )
