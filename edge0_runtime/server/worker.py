"""The one thread that generates: MLX's lazy arrays belong to the thread that made them.

Requests wait in a bounded queue and run one at a time. Events go out through `Job.emit`. A request's
exception fails that request only; should the thread itself end, `alive` turns False and all that waits fails.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from edge0_runtime.sampling import Sampling
from edge0_runtime.text import TextStream, decoder

if TYPE_CHECKING:
    from edge0_runtime.engine import Engine

log = logging.getLogger("edge0_runtime.server")
MAX_WAITING = 8  # beyond the running one; a longer queue only hides that the machine is too slow


@dataclass(frozen=True)
class Piece:
    """Final text, never empty."""

    text: str


@dataclass(frozen=True)
class Finished:
    """The end of a request: finish_reason is stop, length or cancelled; times in seconds from submission."""

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    queued_s: float
    first_token_s: float
    total_s: float


@dataclass(frozen=True)
class Failed:
    """The request failed inside the server; the log has the cause, which may hold paths."""


Event = Piece | Finished | Failed


@dataclass(eq=False)
class Job:
    """One request. `emit` is called from the worker's thread and must not raise."""

    id: str
    prompt_ids: list[int]
    sampling: Sampling
    emit: Callable[[Event], None]
    stops: tuple[str, ...] = ()
    cancelled: threading.Event = field(default_factory=threading.Event)
    submitted: float = field(default_factory=time.perf_counter)


class QueueFullError(Exception):
    """As many requests wait as may wait."""


class WorkerDeadError(Exception):
    """The worker's thread has ended or is closing."""


class Worker:
    """Serves jobs with a loaded engine, in order of arrival. The engine stays the caller's to close."""

    def __init__(self, engine: Engine, max_waiting: int = MAX_WAITING) -> None:
        self._engine = engine
        self._max_waiting = max_waiting
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._main, name="edge0-mlx")

    def start(self) -> None:
        """Start the thread in which all of the engine's MLX work is done; once only."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether jobs are still taken: the thread runs, and nobody has closed it."""
        return not self._stopped and self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """How many requests wait for their turn."""
        return len(self._waiting)

    def submit(self, job: Job) -> None:
        """Queue a job. Raises QueueFullError or WorkerDeadError."""
        with self._changed:
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

    def close(self) -> None:
        """Cancel the running job, fail the waiting ones, end the thread."""
        with self._changed:
            self._stopped = True
            if self._running is not None:
                self._running.cancelled.set()
            self._changed.notify()
        self._thread.join()

    def _main(self) -> None:
        try:
            while (job := self._next()) is not None:
                self._serve(job)
        finally:
            with self._changed:
                self._stopped = True
                abandoned = list(self._waiting)
                self._waiting.clear()
            for job in abandoned:
                job.emit(Failed())

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
            end = _generate(self._engine, job)
        except BaseException as problem:
            log.exception("request %s failed", job.id)
            ends_thread = not isinstance(problem, Exception)  # SystemExit and the like
            self._stopped |= ends_thread  # before the client hears of it: it may ask for /health next
            job.emit(Failed())
            if ends_thread:
                raise
        else:
            job.emit(end)


def _generate(engine: Engine, job: Job) -> Finished:
    """Run one job to its end, emitting its text."""
    started = time.perf_counter()
    first_token = None
    reason: str | None = None
    tokens = 0
    text = TextStream(decoder(engine.tokenizer), job.stops)
    steps = engine.generate(job.prompt_ids, **asdict(job.sampling), cancel=job.cancelled)
    with contextlib.closing(steps):  # type: ignore[type-var]  # an iterator that is a generator
        for step in steps:
            reason = step.finish_reason
            if reason == "cancelled":
                break
            tokens += 1
            first_token = first_token or time.perf_counter()
            if reason != "stop":  # the end token is no text
                _emit(job, text.add(step.token))
            if text.stopped:
                reason = "stop"
            if reason is not None:
                break
    if reason is None:
        raise RuntimeError("the engine ended without a finish reason")
    if reason != "cancelled":
        _emit(job, text.finish())
    now = time.perf_counter()
    return Finished(
        finish_reason="stop" if text.stopped else reason,
        prompt_tokens=len(job.prompt_ids),
        completion_tokens=tokens,
        queued_s=started - job.submitted,
        first_token_s=(first_token or now) - job.submitted,
        total_s=now - job.submitted,
    )


def _emit(job: Job, text: str) -> None:
    if text:
        job.emit(Piece(text))
