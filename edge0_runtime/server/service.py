"""What every endpoint does alike: find the model, prepare the request off the event loop, queue it, bring the answer back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from edge0_runtime.server.answer import Writer, submit
from edge0_runtime.server.errors import ApiError
from edge0_runtime.server.exchange import GenerationRequest
from edge0_runtime.server.served import Served
from edge0_runtime.server.worker import Worker

T = TypeVar("T")


class Service:
    """The models that requests may name, and the worker that generates for them.

    Attributes:
        models: by name; the first one is asked where a request names none.
    """

    def __init__(self, models: Mapping[str, Served], worker: Worker) -> None:
        self.models, self.worker = models, worker
        # Rendering a template and tokenising take seconds for megabytes; a tokenizer is one thread's at a time.
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="edge0-prompts")

    def model(self, name: str | None) -> Served:
        """The model of that name. Raises ApiError where there is none."""
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            known = ", ".join(repr(one) for one in self.models)
            raise ApiError(404, f"model: not served here; use {known} or leave it out", "model", "model_not_found")
        return self.models[name]

    async def prepare(self, make: Callable[[], T]) -> T:
        """Run what may take long beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._preparing, make)

    async def answer(
        self, http: Request, served: Served, wanted: GenerationRequest, writer: Writer, *, stream: bool
    ) -> Response:
        """Queue a request and answer it. Raises ApiError where it fails before its first event."""
        answer = submit(self.worker, served, wanted, writer.id)
        # The loop itself holds tasks only weakly.
        http.state.watcher = asyncio.create_task(answer.cancel_on_disconnect(http))
        # Waiting for the first event gives a failure before any text a proper HTTP status, streamed or not.
        first = await answer.next()
        if not stream:
            return await answer.whole(first, writer)
        headers = {"Cache-Control": "no-cache"}
        return StreamingResponse(answer.stream(first, writer), media_type="text/event-stream", headers=headers)

    def start(self) -> None:
        """Start generating."""
        self.worker.start()

    def close(self) -> None:
        """Cancel what runs and wait for it."""
        self.worker.close()
        self._preparing.shutdown(cancel_futures=True)
