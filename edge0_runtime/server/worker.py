"""The one thread that generates: MLX's lazy arrays belong to the thread that made them.

Requests wait in a bounded queue and run one at a time. Events go out through `Job.emit`. A request's
exception fails that request only; should the thread itself end, `alive` turns False and all that waits fails.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edge0_runtime.server.exchange import Cancelled, Failed, GenerationRequest
from edge0_runtime.server.generation import Emit, generate

if TYPE_CHECKING:
    from edge0_runtime.engine import Engine

log = logging.getLogger("edge0_runtime.server")
MAX_WAITING = 8  # beyond the running one; a longer queue only hides that the machine is too slow


@dataclass(eq=False)
class Job:
    """One request, and the engine that it is for. `emit` is called from the worker's thread and must not raise.

    `context` is that of the code that made it, so that log lines name the HTTP request.
    """

    id: str
    engine: Engine
    request: GenerationRequest
    emit: Emit
    cancelled: threading.Event = field(default_factory=threading.Event)
    submitted: float = field(default_factory=time.perf_counter)
    context: contextvars.Context = field(default_factory=contextvars.copy_context)


class QueueFullError(Exception):
    """As many requests wait as may wait."""


class WorkerDeadError(Exception):
    """The worker's thread has ended."""


class EndingError(Exception):
    """The worker is to end and takes nothing new."""


class Worker:
    """Serves jobs in order of arrival. Their engines stay the caller's to close.

    Attributes:
        failures: jobs that failed since the last one that did not.
    """

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._stopped = self._ending = False
        self.failures = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._main, name="edge0-mlx")

    def start(self) -> None:
        """Start the thread in which all MLX work of requests is done; once only."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether jobs are still taken: the thread runs, and nobody has closed it."""
        return not self._stopped and self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """How many requests wait for their turn."""
        return len(self._waiting)

    @property
    def ending(self) -> bool:
        """Whether nothing new is taken since the server is to end."""
        return self._ending

    @property
    def running(self) -> int:
        """How many requests run: 0 or 1."""
        return int(self._running is not None)

    @property
    def idle(self) -> bool:
        """Whether no job runs or waits."""
        with self._changed:
            return self._running is None and not self._waiting

    def submit(self, job: Job) -> None:
        """Queue a job. Raises QueueFullError, EndingError or WorkerDeadError."""
        with self._changed:
            if self._ending:
                raise EndingError
            if not self.alive:
                raise WorkerDeadError
            # An idle worker takes the job at once, so it does not count as waiting.
            if len(self._waiting) >= self._max_waiting + (self._running is None):
                raise QueueFullError
            self._waiting.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Stop a job within one token, or take it out of the queue; nothing happens to one that has ended."""
        job.cancelled.set()
        with self._changed, contextlib.suppress(ValueError):
            self._waiting.remove(job)

    def drain(self) -> None:
        """Take nothing new; what runs and waits goes on."""
        with self._changed:
            self._ending = True

    def close(self) -> None:
        """Cancel the running job, fail the waiting ones, end the thread; may be called again."""
        with self._changed:
            self._stopped = self._ending = True
            if self._running is not None:
                self._running.cancelled.set()
            self._changed.notify()
        self._thread.join()

    def _main(self) -> None:
        try:
            while (job := self._next()) is not None:
                job.context.run(self._serve, job)
        finally:
            with self._changed:
                self._stopped = True
                abandoned = list(self._waiting)
                self._waiting.clear()
            for job in abandoned:
                job.emit(Failed(ending=self._ending))

    def _next(self) -> Job | None:
        with self._changed:
            self._running = None
            self._changed.wait_for(lambda: self._waiting or self._stopped)
            if self._stopped:
                return None
            self._running = self._waiting.popleft()
            return self._running

    def _serve(self, job: Job) -> None:
        try:
            end = generate(job.engine, job.request, job.emit, job.cancelled, job.submitted)
        except BaseException as problem:
            log.exception("request %s failed", job.id)
            self.failures += 1
            ends_thread = not isinstance(problem, Exception)  # SystemExit and the like
            self._stopped |= ends_thread  # before the client hears of it: it may ask for /health next
            job.emit(Failed())
            if ends_thread:
                raise
        else:
            self.failures = 0
            # Nobody may be listening any more; somebody who is must not take what came for all of it.
            job.emit(Failed(ending=True) if isinstance(end, Cancelled) and self._stopped else end)
