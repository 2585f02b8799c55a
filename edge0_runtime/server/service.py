"""What every endpoint does alike: find the model, prepare the request off the event loop, queue it, bring the answer back."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from edge0_runtime.server.answer import Writer, submit
from edge0_runtime.server.errors import ApiError
from edge0_runtime.server.exchange import Finished, GenerationRequest
from edge0_runtime.server.logs import fields
from edge0_runtime.server.metrics import Metrics
from edge0_runtime.server.served import Served
from edge0_runtime.server.worker import Worker

log = logging.getLogger("edge0_runtime.server")
T = TypeVar("T")
FIRST_EVENT_S = 1.0  # that a stream's headers wait: what fails at once then has a proper HTTP status
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # nginx would hold events back


class Service:
    """The models that requests may name, and the worker that generates for them.

    Attributes:
        models: by name; the first one is asked where a request names none. metrics: of all that is asked.
    """

    def __init__(self, models: Mapping[str, Served], worker: Worker) -> None:
        self.models, self.worker = models, worker
        self.metrics = Metrics([served.engine for served in models.values()], worker)
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
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._preparing, lambda: context.run(make))

    async def answer(
        self, http: Request, served: Served, wanted: GenerationRequest, writer: Writer, *, stream: bool
    ) -> Response:
        """Queue a request and answer it. Raises ApiError where it fails before its first event."""
        answer = submit(self.worker, served, wanted, writer.id, self._note)
        # The loop itself holds tasks only weakly.
        http.state.watcher = asyncio.create_task(answer.cancel_on_disconnect(http))
        if not stream:
            return await answer.whole(await answer.next(), writer)
        first = await answer.next_within(FIRST_EVENT_S)
        return StreamingResponse(answer.stream(first, writer), media_type="text/event-stream", headers=STREAM_HEADERS)

    def health(self) -> tuple[int, dict[str, Any]]:
        """HTTP status and body of /health: 200 while requests are taken; `reason` where not all is well."""
        worker = self.worker
        reason = None
        if worker.ending:
            reason = "the server is being shut down"
        elif not worker.alive:
            reason = "the engine's thread has ended; restart the server"
        taken = reason is None
        if taken and worker.failures:
            reason = f"the last generations failed, {worker.failures} in a row; the server's log has the cause"
        told = {"status": "ready"} if reason is None else {"status": "degraded", "reason": reason}
        return 200 if taken else 503, told | {"waiting": worker.waiting, "running": worker.running}

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return self.worker.idle

    def drain(self) -> None:
        """Take no new request; what runs and waits goes on."""
        self.worker.drain()

    def start(self) -> None:
        """Start generating."""
        self.worker.start()

    def _note(self, end: Finished) -> None:
        self.metrics.generated(end)
        told = {name: round(value, 6) for name, value in dataclasses.asdict(end).items()}
        log.info(
            "generated %d tokens after a prompt of %d in %.3f s, the first after %.3f s",
            end.completion_tokens, end.prompt_tokens, end.total_s, end.first_token_s, extra=fields(**told),
        )  # fmt: skip

    def close(self) -> None:
        """Cancel what runs and wait for it; may be called again."""
        self.worker.close()
        self._preparing.shutdown(cancel_futures=True)
