"""What decode steps do, counted while somebody watches: which experts ran, were predicted and read, and where time and bytes go.

    with engine.observation.watch():
        before = engine.observation.seen()
        ...                                  # a request runs in another thread
        after = engine.observation.seen()

The thread that generates counts (`begin`, `saw`, `end`); any thread may look (`seen`). Nothing that is looked at is an MLX array:
those belong to the thread that made them. While nobody watches, a token costs one look at a number.

Shapes: L MoE layers, E experts per layer, K experts per token.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from edge0_runtime.experts.memory import COUNTERS
from edge0_runtime.model import Model
from edge0_runtime.request import Token
from edge0_runtime.sequence import Sequence as ModelSequence
from edge0_runtime.step import Step

RECENT_STEPS = 256
RAN, PREDICTED, READ = range(3)

State = Literal["idle", "prompt", "answer"]


@dataclass(frozen=True)
class StepTime:
    """One decode step. All in seconds or bytes.

    Attributes:
        seconds: from the token before to this one, whatever the caller did with that one included.
        blocked_seconds: of it, waiting for experts. bytes_read: what arrived from the disk meanwhile, for whichever step.
    """

    seconds: float
    blocked_seconds: float
    bytes_read: int


@dataclass(frozen=True)
class Seen:
    """The counts up to one moment, of decode steps that somebody watched. The first token comes from the prompt and is none.

    Attributes:
        state: what the engine does now: nothing, a prompt, an answer.
        counts_3LE: RAN, PREDICTED, READ: how often each expert ran; was known to run, or guessed, before its layer's turn;
            arrived from the disk.
        steps, seconds: decode steps, and what they took.
        totals: what `ExpertMemory.counters` counts, by these steps alone.
        guessed, guessed_right: experts of layers that choose themselves, guessed; and those of them that ran.
        recent: the last steps, at most RECENT_STEPS.
    """

    state: State
    counts_3LE: np.ndarray
    steps: int
    seconds: float
    totals: Mapping[str, float]
    guessed: int
    guessed_right: int
    recent: tuple[StepTime, ...]


class Observation:
    """Counts what an engine's decode steps do.

    Attributes:
        layers: the MoE layers, in the order of the counts' rows. state: as in `Seen`.
    """

    def __init__(self, layers: Sequence[int], num_experts: int) -> None:
        """Nobody watches yet."""
        self.layers = tuple(layers)
        self.state: State = "idle"
        self._row = {layer: row for row, layer in enumerate(self.layers)}
        self._lock = threading.Lock()  # of all counts, which change together
        self._watchers = 0
        self._counts_3LE = np.zeros((3, len(self.layers), num_experts), np.int64)
        self._steps = self._guessed = self._guessed_right = 0
        self._seconds = 0.0
        self._totals = dict.fromkeys(COUNTERS, 0.0)
        self._recent: deque[StepTime] = deque(maxlen=RECENT_STEPS)
        self._before: tuple[float, Mapping[str, float]] | None = (
            None  # clock and counters at the last token that was seen
        )

    # -- any thread ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Have steps counted meanwhile."""
        with self._lock:
            self._watchers += 1
        try:
            yield
        finally:
            with self._lock:
                self._watchers -= 1

    @property
    def watchers(self) -> int:
        """How many watch."""
        return self._watchers

    def seen(self) -> Seen:
        """A copy of the counts, of whole steps."""
        with self._lock:
            return Seen(
                self.state,
                self._counts_3LE.copy(),
                self._steps,
                self._seconds,
                dict(self._totals),
                self._guessed,
                self._guessed_right,
                tuple(self._recent),
            )

    # -- the thread that generates -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A request begins, with its prompt."""
        self.state = "prompt"

    def saw(self, model: Model, sequence: ModelSequence, token: Token) -> None:
        """The sequence has come to this token; it was evaluated, if it is none that says that it was cancelled."""
        self.state = "answer"
        if not self._watchers or token.finish_reason == "cancelled":
            self._forget(model)
            return
        now, counters = time.perf_counter(), _counters(model)
        reads = [] if model.memory is None else model.memory.take_reads(go_on=True)
        before, self._before = self._before, (now, counters)
        step = sequence.last
        if step is not None and step.index != token.index - 1:
            step = step.last  # the next one is built already, where nothing is waited for
        if before is not None and step is not None and step.decoding:
            totals = {name: counters[name] - before[1][name] for name in COUNTERS}
            self._count(step, now - before[0], totals, reads)

    def end(self, model: Model) -> None:
        """The request is over, whatever became of it."""
        self.state = "idle"
        self._forget(model)

    def _forget(self, model: Model) -> None:
        """The next token that is seen begins anew: what lies between was watched by nobody, or was a prompt."""
        if self._before is not None:
            self._before = None
            if model.memory is not None:
                model.memory.take_reads(go_on=False)

    def _count(
        self, step: Step, seconds: float, totals: Mapping[str, float], reads: Sequence[tuple[int, int, int]]
    ) -> None:
        ran_LK = step.executed()
        guessed = right = 0
        predicted: list[tuple[int, np.ndarray]] = []
        for row, layer in enumerate(self.layers):
            if layer in step.staged or layer in step.foreseen:
                predicted.append((row, ran_LK[row]))  # a prediction is the routing
            elif (guessed_K := step.guessed.get(layer)) is not None:
                predicted.append((row, guessed_K))
                guessed += len(guessed_K)
                right += int(np.isin(guessed_K, ran_LK[row]).sum())
        time_of_step = StepTime(seconds, totals["blocked_seconds"], int(totals["bytes_read"]))
        with self._lock:
            self._counts_3LE[RAN, np.arange(len(self.layers))[:, None], ran_LK] += 1
            for row, experts_K in predicted:
                self._counts_3LE[PREDICTED, row, experts_K] += 1
            for layer, first, count in reads:
                self._counts_3LE[READ, self._row[layer], first : first + count] += 1
            self._steps += 1
            self._seconds += seconds
            self._guessed += guessed
            self._guessed_right += right
            for name, value in totals.items():
                self._totals[name] += value
            self._recent.append(time_of_step)


def _counters(model: Model) -> Mapping[str, float]:
    return dict.fromkeys(COUNTERS, 0.0) if model.memory is None else model.memory.counters()
