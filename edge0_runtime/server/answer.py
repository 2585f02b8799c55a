"""One answer on its way from the worker's thread to the client: one JSON object, or server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from edge0_runtime.server.errors import ApiError
from edge0_runtime.server.exchange import Cancelled, Choice, Event, Failed, Finished, GenerationRequest, collected
from edge0_runtime.server.served import Served
from edge0_runtime.server.worker import EndingError, Job, QueueFullError, Worker, WorkerDeadError

CLIENT_CLOSED_REQUEST = 499  # nobody reads this response; the number is nginx's
RETRY_AFTER_S = 5
KEEP_ALIVE_S = 10.0  # of silence in a stream, until a comment says that it lives: proxies wait for some 30 to 60
KEEP_ALIVE = ": working on it\n\n"


class Writer(Protocol):
    """A protocol's way to write the answer to one request, whose name is `id`."""

    id: str

    def whole(self, choices: list[Choice], end: Finished) -> dict[str, Any]:
        """All of it as one JSON object."""

    def begin(self) -> Iterable[str]:
        """Server-sent events before the first event."""

    def write(self, event: Event) -> Iterable[str]:
        """Server-sent events for one event; what ends a stream follows from `Finished`."""

    def failed(self, problem: ApiError) -> str:
        """The server-sent event of an error in mid-stream."""


@dataclass(frozen=True)
class Answer:
    """A queued request and its events."""

    worker: Worker
    job: Job
    events: asyncio.Queue[Event]

    async def next(self) -> Event:
        """The next event. Raises ApiError where the request failed."""
        event = await self.events.get()
        if isinstance(event, Failed) and event.ending:
            raise server_ending()
        if isinstance(event, Failed):
            raise ApiError(500, f"the generation failed; the server's log has the cause under {self.job.id}")
        return event

    async def next_within(self, seconds: float) -> Event | None:
        """The same; None where nothing comes for so long."""
        try:
            async with asyncio.timeout(seconds):
                return await self.next()
        except TimeoutError:
            return None

    async def cancel_on_disconnect(self, request: Request) -> None:
        """Ends by itself: the HTTP server reports a disconnect after every response, too."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.worker.cancel(self.job)
        # A job taken out of the queue has no other end; after one that has run, nobody reads this.
        self.job.emit(Cancelled())

    async def whole(self, event: Event, writer: Writer) -> Response:
        """All of it, `event` being the first event."""
        events = [event]
        while not isinstance(event, Finished | Cancelled):
            event = await self.next()
            events.append(event)
        if isinstance(event, Cancelled):
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JSONResponse(writer.whole(collected(events), event))

    async def stream(self, event: Event | None, writer: Writer) -> AsyncIterator[str]:
        """Server-sent events, `event` being the first event, or None where the stream begins before it."""
        try:
            for text in writer.begin():
                yield text
            while not isinstance(event, Cancelled):
                for text in (KEEP_ALIVE,) if event is None else writer.write(event):
                    yield text
                if isinstance(event, Finished):
                    return
                event = await self.next_within(KEEP_ALIVE_S)
        except ApiError as problem:  # the status line is gone; clients look for an error object in the stream
            yield writer.failed(problem)
        finally:
            self.worker.cancel(self.job)


def submit(
    worker: Worker, served: Served, request: GenerationRequest, name: str, note: Callable[[Finished], None]
) -> Answer:
    """Queue a request from the event loop's thread; `note` hears of its end, in the worker's.

    Raises ApiError where the queue is full, or the worker has ended or is to.
    """
    loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def emit(event: Event) -> None:
        if isinstance(event, Finished):
            note(event)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            loop.call_soon_threadsafe(events.put_nowait, event)

    job = Job(name, served.engine, request, emit)
    try:
        worker.submit(job)
    except QueueFullError as problem:
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        raise ApiError(503, "the queue is full; try again later", None, "queue_full", headers) from problem
    except EndingError as problem:
        raise server_ending() from problem
    except WorkerDeadError as problem:
        raise ApiError(503, "the engine has ended; restart the server", None, "engine_ended") from problem
    return Answer(worker, job, events)


def server_ending() -> ApiError:
    """What is said to who asks, or still waits, when the server ends."""
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return ApiError(503, "the server is being shut down; try again later", None, "server_ending", headers)


def sse(data: dict[str, Any], event: str | None = None) -> str:
    """A server-sent event, with a name where the protocol names its events."""
    name = "" if event is None else f"event: {event}\n"
    return f"{name}data: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n"
