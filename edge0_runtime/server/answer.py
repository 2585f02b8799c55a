"""One answer on its way from the worker's thread to the client: one JSON object, or server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from edge0_runtime.sampling import Sampling
from edge0_runtime.server.schema import ApiError
from edge0_runtime.server.worker import Event, Failed, Finished, Job, Piece, Worker

CLIENT_CLOSED_REQUEST = 499  # nobody reads this response; the number is nginx's


@dataclass(frozen=True)
class Answer:
    """A queued request and its events. `created` is in Unix seconds."""

    worker: Worker
    job: Job
    events: asyncio.Queue[Event]
    model: str
    created: int

    async def next(self) -> Piece | Finished:
        """The next event. Raises ApiError where the request failed."""
        event = await self.events.get()
        if isinstance(event, Failed):
            raise ApiError(500, f"the generation failed; the server's log has the cause under {self.job.id}")
        return event

    async def cancel_on_disconnect(self, request: Request) -> None:
        """Ends by itself: the HTTP server reports a disconnect after every response, too."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.worker.cancel(self.job)
        # A job taken out of the queue has no other end; after one that has run, nobody reads this.
        self.job.emit(Finished("cancelled", len(self.job.prompt_ids), 0, 0.0, 0.0, 0.0))

    async def whole(self, event: Piece | Finished) -> Response:
        """All of it, `event` being the first event."""
        text = ""
        while isinstance(event, Piece):
            text += event.text
            event = await self.next()
        if event.finish_reason == "cancelled":
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": event.finish_reason}
        return JSONResponse(self._head("chat.completion") | {"choices": [choice]} | _totals(event))

    async def stream(self, event: Piece | Finished, include_usage: bool) -> AsyncIterator[str]:
        """Server-sent events: role, text, exactly one finish_reason, usage where asked for, [DONE]."""
        head = self._head("chat.completion.chunk")

        def chunk(delta: dict[str, str], finish_reason: str | None = None) -> str:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
            return _sse(head | {"choices": [choice]} | ({"usage": None} if include_usage else {}))

        try:
            yield chunk({"role": "assistant", "content": ""})
            while isinstance(event, Piece):
                yield chunk({"content": event.text})
                event = await self.next()
            if event.finish_reason == "cancelled":
                return
            yield chunk({}, event.finish_reason)
            if include_usage:
                yield _sse(head | {"choices": []} | _totals(event))
            yield "data: [DONE]\n\n"
        except ApiError as problem:  # the status line is gone; clients look for an error object in the stream
            yield _sse(problem.body())
        finally:
            self.worker.cancel(self.job)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.job.id, "object": kind, "created": self.created, "model": self.model}


def submit(worker: Worker, prompt_ids: list[int], sampling: Sampling, stops: Sequence[str], model: str) -> Answer:
    """Queue a request from the event loop's thread. Raises QueueFullError or WorkerDeadError."""
    loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def emit(event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            loop.call_soon_threadsafe(events.put_nowait, event)

    job = Job(f"chatcmpl-{uuid.uuid4().hex}", prompt_ids, sampling, emit, tuple(stops))
    worker.submit(job)
    return Answer(worker, job, events, model, int(time.time()))


def _sse(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n"


def _totals(end: Finished) -> dict[str, Any]:
    """`usage` as OpenAI's; `timings` from arrival, and the steady speed (n - 1) / (t_last - t_first)."""
    prompt, completion = end.prompt_tokens, end.completion_tokens
    steady_s = end.total_s - end.first_token_s
    speed = (completion - 1) / steady_s if completion > 1 and steady_s > 0 else 0.0
    times = {"queued_s": end.queued_s, "first_token_s": end.first_token_s, "total_s": end.total_s}
    return {
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        },
        "timings": {name: round(value, 6) for name, value in (times | {"decode_tokens_per_s": speed}).items()},
    }
