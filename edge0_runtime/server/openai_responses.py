"""POST /v1/responses: OpenAI's responses, stateless, to and from the server's own request."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response

from edge0_runtime.sampling import Sampling
from edge0_runtime.server.answer import sse
from edge0_runtime.server.errors import ApiError
from edge0_runtime.server.exchange import Choice, ChoiceEnd, Event, Finished, Text, Thinking, TokenLogprob, ToolCall
from edge0_runtime.server.openai import Head, timings, told_tokens
from edge0_runtime.server.openai_responses_schema import ResponsesRequest
from edge0_runtime.server.service import Service

Item = dict[str, Any]


def add_routes(app: FastAPI, service: Service) -> None:
    """The endpoint, on the app."""

    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        served = service.model(body.model)
        wanted = await service.prepare(lambda: body.request(served))
        writer = ResponseWriter(served.id, body, wanted.sampling)
        return await service.answer(request, served, wanted, writer, stream=body.stream)


class ResponseWriter:
    """OpenAI's response, whole or as its numbered events: one item after the other, each added, filled and done."""

    def __init__(self, model: str, body: ResponsesRequest, sampling: Sampling) -> None:
        self._head = Head("resp", model)
        self.id = self._head.id
        self._body, self._sampling, self._logprobs = body, sampling, body.tells_logprobs
        self._numbers = itertools.count()
        self._done: list[Item] = []
        self._open: Item | None = None  # a message or thinking that grows
        self._reason = "stop"

    def whole(self, choices: Sequence[Choice], end: Finished) -> dict[str, Any]:
        """One response."""
        (choice,) = choices
        status = "incomplete" if choice.reason == "length" else "completed"
        output = [_thought(choice.thinking)] if choice.thinking else []
        if choice.text or not choice.calls:
            output.append(_message(choice.text, self._told(choice.tokens)) | {"status": status})
        return self._response(status, [*output, *map(_call, choice.calls)], end)

    def begin(self) -> Iterator[str]:
        """The response without output, twice: created, and in progress."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress", [], None))

    def write(self, event: Event) -> Iterator[str]:
        """Events for one event."""
        match event:
            case Text(_, text, tokens):
                yield from self._opened("message")
                assert self._open is not None
                part = self._open["content"][0]
                part["text"] += text
                part["logprobs"] += self._told(tokens)
                yield self._at("response.output_text.delta", content_index=0, delta=text, logprobs=self._told(tokens))
            case Thinking(_, text):
                yield from self._opened("reasoning")
                assert self._open is not None
                self._open["content"][0]["text"] += text
                yield self._at("response.reasoning_text.delta", content_index=0, delta=text)
            case ToolCall():
                yield from self._called(event)
            case ChoiceEnd(_, reason):
                self._reason = reason
            case Finished():
                yield from self._finished(event)
            case _:
                pass

    def failed(self, problem: ApiError) -> str:
        """OpenAI's error event of responses: flat as it is documented, and with the object that their clients look for."""
        return self._event("error", code=problem.code, message=problem.message, param=problem.param, **problem.openai())

    def _finished(self, end: Finished) -> Iterator[str]:
        status = "incomplete" if self._reason == "length" else "completed"
        if not self._done and self._open is None:  # an empty answer has one empty message, as a whole one
            yield from self._opened("message")
        yield from self._closed(status)
        yield self._event(f"response.{status}", response=self._response(status, self._done, end))

    def _opened(self, kind: str) -> Iterator[str]:
        """Have an item of that kind open."""
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self._closed("completed")
        self._open = (_message("", []) if kind == "message" else _thought("")) | {"status": "in_progress"}
        yield self._at("response.output_item.added", item=self._open | {"content": []})
        yield self._at("response.content_part.added", content_index=0, part=self._open["content"][0])

    def _closed(self, status: str) -> Iterator[str]:
        """Have no item open."""
        if self._open is None:
            return
        part = self._open["content"][0]
        if self._open["type"] == "message":
            done = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._at("response.output_text.done", content_index=0, **done)
        else:
            yield self._at("response.reasoning_text.done", content_index=0, text=part["text"])
        yield self._at("response.content_part.done", content_index=0, part=part)
        self._open["status"] = status
        yield self._at("response.output_item.done", item=self._open)
        self._done.append(self._open)
        self._open = None

    def _called(self, call: ToolCall) -> Iterator[str]:
        yield from self._closed("completed")
        item = self._open = _call(call)
        yield self._at("response.output_item.added", item=item | {"arguments": "", "status": "in_progress"})
        yield self._at("response.function_call_arguments.delta", delta=call.arguments)
        yield self._at("response.function_call_arguments.done", arguments=call.arguments)
        yield self._at("response.output_item.done", item=item)
        self._done.append(item)
        self._open = None

    def _at(self, kind: str, **fields: Any) -> str:
        """An event of the open item."""
        assert self._open is not None
        where = {"output_index": len(self._done)} | ({} if "item" in fields else {"item_id": self._open["id"]})
        return self._event(kind, **where, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        return sse({"type": kind, "sequence_number": next(self._numbers)} | fields, kind)

    def _told(self, tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return told_tokens(tokens) if self._logprobs else []

    def _response(self, status: str, output: list[Item], end: Finished | None) -> dict[str, Any]:
        """The response object, with what the request said."""
        body = self._body
        said = body.model_dump(mode="json", by_alias=True, exclude_none=True)
        chosen = {"temperature": self._sampling.temperature, "top_p": self._sampling.top_p}
        response: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._head.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "store": False,
            "text": said["text"],
            "tool_choice": said["tool_choice"],
            "tools": said["tools"],
            "top_logprobs": body.top_logprobs,
            "truncation": "disabled",
            "usage": None if end is None else _usage(end),
        }
        return response | chosen | ({} if end is None else {"timings": timings(end)})


def _message(text: str, logprobs: list[dict[str, Any]]) -> Item:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return _item("msg", type="message", role="assistant", status="completed", content=[part])


def _thought(text: str) -> Item:
    part = {"type": "reasoning_text", "text": text}
    return _item("rs", type="reasoning", summary=[], content=[part], status="completed")


def _call(call: ToolCall) -> Item:
    fields = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
    return _item("fc", type="function_call", status="completed", **fields)


def _item(prefix: str, **fields: Any) -> Item:
    return {"id": f"{prefix}_{uuid.uuid4().hex}"} | fields


def _usage(end: Finished) -> dict[str, Any]:
    return {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {"cached_tokens": end.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": end.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": end.thinking_tokens},
        "total_tokens": end.prompt_tokens + end.completion_tokens,
    }
