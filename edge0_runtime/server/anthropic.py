"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's messages, to and from the server's own request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from edge0_runtime.server.answer import sse
from edge0_runtime.server.anthropic_schema import CountRequest, MessagesRequest
from edge0_runtime.server.errors import ApiError
from edge0_runtime.server.exchange import Choice, ChoiceEnd, Event, Finished, Text, Thinking, ToolCall
from edge0_runtime.server.openai import Head, timings
from edge0_runtime.server.service import Service

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
Block = Annotated[dict[str, Any], "a content block"]


def add_routes(app: FastAPI, service: Service) -> None:
    """The endpoints, on the app."""

    @app.post("/v1/messages")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        served = service.model(body.model)
        wanted = await service.prepare(lambda: body.request(served))
        writer = MessageWriter(served.id, sum(map(len, wanted.prompts)))
        return await service.answer(request, served, wanted, writer, stream=body.stream)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountRequest) -> Response:
        served = service.model(body.model)
        prompt = await service.prepare(lambda: body.conversation().prompt(served))
        return JSONResponse({"input_tokens": len(prompt)})


class MessageWriter:
    """Anthropic's message, whole or as its named events: one block after the other, each begun, filled and stopped."""

    def __init__(self, model: str, input_tokens: int) -> None:
        self._head = Head("msg", model)
        self.id = self._head.id
        self._input_tokens = input_tokens
        self._index, self._open = -1, ""  # the block that is open, and its type
        self._end: ChoiceEnd | None = None

    def whole(self, choices: Sequence[Choice], end: Finished) -> dict[str, Any]:
        """One message."""
        (choice,) = choices
        content: list[Block] = []
        if choice.thinking:
            content.append({"type": "thinking", "thinking": choice.thinking, "signature": ""})
        if choice.text or not choice.calls:
            content.append({"type": "text", "text": choice.text})
        content += [_tool_use(call) | {"input": json.loads(call.arguments)} for call in choice.calls]
        reason = _reason(choice.reason, choice.stopped_by)
        return self._message(content) | reason | {"usage": _usage(end), "timings": timings(end)}

    def begin(self) -> Iterator[str]:
        """The message without its content."""
        usage = {"input_tokens": self._input_tokens, "output_tokens": 0}
        empty = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message=empty)

    def write(self, event: Event) -> Iterator[str]:
        """Events for one event."""
        match event:
            case Text(_, text) if text:
                yield from self._filled({"type": "text", "text": ""}, {"type": "text_delta", "text": text})
            case Thinking(_, text):
                empty = {"type": "thinking", "thinking": "", "signature": ""}
                yield from self._filled(empty, {"type": "thinking_delta", "thinking": text})
            case ToolCall():
                yield from self._stopped()
                delta = {"type": "input_json_delta", "partial_json": event.arguments}
                yield from self._filled(_tool_use(event) | {"input": {}}, delta)
                yield from self._stopped()
            case ChoiceEnd():
                self._end = event
            case Finished():
                yield from self._finished(event)
            case _:
                pass

    def failed(self, problem: ApiError) -> str:
        """Anthropic's error event."""
        return sse(problem.anthropic(), "error")

    def _finished(self, end: Finished) -> Iterator[str]:
        if self._index < 0:  # an empty answer has one empty block, as a whole one
            yield from self._filled({"type": "text", "text": ""}, None)
        yield from self._stopped()
        assert self._end is not None
        yield _event("message_delta", delta=_reason(self._end.reason, self._end.stopped_by), usage=_usage(end))
        yield _event("message_stop")

    def _filled(self, block: Block, delta: dict[str, Any] | None) -> Iterator[str]:
        if self._open != block["type"]:
            yield from self._stopped()
            self._index, self._open = self._index + 1, block["type"]
            yield _event("content_block_start", index=self._index, content_block=block)
        if delta is not None:
            yield _event("content_block_delta", index=self._index, delta=delta)

    def _stopped(self) -> Iterator[str]:
        if self._open:
            self._open = ""
            yield _event("content_block_stop", index=self._index)

    def _message(self, content: list[Block]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self._head.model, "content": content}


def _event(kind: str, **fields: Any) -> str:
    return sse({"type": kind} | fields, kind)


def _tool_use(call: ToolCall) -> Block:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _reason(reason: str, stopped_by: str | None) -> dict[str, Any]:
    return {
        "stop_reason": STOP_REASONS[reason] if stopped_by is None else "stop_sequence",
        "stop_sequence": stopped_by,
    }


def _usage(end: Finished) -> dict[str, int]:
    """Anthropic counts what came from the cache apart."""
    return {
        "input_tokens": end.prompt_tokens - end.cached_tokens,
        "output_tokens": end.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": end.cached_tokens,
    }
