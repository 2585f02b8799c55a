"""One request on an engine, in the thread that generates: its choices one after the other, as events."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edge0_runtime.sampling import Processor
from edge0_runtime.server.exchange import (
    Cancelled,
    ChoiceEnd,
    Event,
    Finished,
    GenerationRequest,
    Logprobs,
    Progress,
    Text,
    TokenLogprob,
)
from edge0_runtime.text import TextStream, decoder

if TYPE_CHECKING:
    from edge0_runtime.engine import Engine, Token

Emit = Callable[[Event], None]


@dataclass
class _Clock:
    """Where the time of a request goes; moments as `time.perf_counter` has them, durations in seconds."""

    submitted: float
    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    prefill_s: float = 0.0
    decode_s: float = 0.0
    tokens: int = 0
    thinking: int = 0  # of the tokens
    cached_tokens: int = 0  # of each prompt once, as usage counts it
    steps: int = 0

    def finished(self, engine: Engine, before: dict[str, Any], prompt_tokens: int) -> Finished:
        now, after = time.perf_counter(), engine.stats()
        return Finished(
            prompt_tokens=prompt_tokens,
            completion_tokens=self.tokens,
            thinking_tokens=self.thinking,
            cached_tokens=self.cached_tokens,
            queued_s=self.started - self.submitted,
            first_token_s=(self.first_token or now) - self.submitted,
            total_s=now - self.submitted,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            blocked_s=after["blocked_load_seconds"] - before["blocked_load_seconds"],
            bytes_read=after["expert_bytes"] - before["expert_bytes"],
            decode_tokens_per_s=self.steps / self.decode_s if self.steps and self.decode_s > 0 else 0.0,
        )


def generate(
    engine: Engine, request: GenerationRequest, emit: Emit, cancelled: threading.Event, submitted: float
) -> Finished | Cancelled:
    """Run a request to its end, emitting what becomes final of it; `submitted` is when it arrived."""
    clock, before = _Clock(submitted), engine.stats()
    for number in range(len(request.prompts) * request.n):
        prompt = request.prompts[number // request.n]
        if not _one(engine, request, number, prompt, emit, cancelled, clock):
            return Cancelled()
    return clock.finished(engine, before, sum(map(len, request.prompts)))


def _one(
    engine: Engine,
    request: GenerationRequest,
    number: int,
    prompt: tuple[int, ...],
    emit: Emit,
    cancelled: threading.Event,
    clock: _Clock,
) -> bool:
    """One choice; whether it came to its end."""
    sampling = request.sampling
    choice = _Choice(engine, request, number, emit)
    began, first, last = time.perf_counter(), 0.0, 0.0

    def processed(tokens: int, known: int) -> None:
        emit(Progress(number, len(prompt), known, tokens, time.perf_counter() - began))

    options = dataclasses.asdict(sampling)
    options["max_tokens"] = min(sampling.max_tokens, engine.context_length - len(prompt))
    if sampling.seed is not None:
        options["seed"] = (sampling.seed + number % request.n) % 2**64
    steps = engine.generate(
        list(prompt),
        **options,
        processors=_processors(request, len(prompt)),
        top_logprobs=0 if request.logprobs is None else request.logprobs.top,
        progress=processed if request.progress else None,
        cancel=cancelled,
    )
    with contextlib.closing(steps):  # type: ignore[type-var]  # an iterator that is a generator
        for step in steps:
            if step.finish_reason == "cancelled":
                return False
            last = time.perf_counter()
            if first == 0.0 and number % request.n == 0:
                clock.cached_tokens += step.cached_tokens
            first = first or last
            clock.first_token = clock.first_token or last
            clock.tokens += 1
            clock.steps += last > first
            clock.thinking += choice.thinks
            if choice.add(step):
                break
    if first == 0.0:
        raise RuntimeError("the engine ended without a finish reason")
    clock.prefill_s += first - began
    clock.decode_s += last - first
    return True


def _processors(request: GenerationRequest, prompt_tokens: int) -> list[Processor]:
    processors = request.penalties.processors(prompt_tokens)
    return processors if request.grammar is None else [*processors, request.grammar.processor(prompt_tokens)]


class _Choice:
    """One choice on its way from tokens to events."""

    def __init__(self, engine: Engine, request: GenerationRequest, number: int, emit: Emit) -> None:
        self._number, self._emit = number, emit
        self._splitter = None if request.splitter is None else request.splitter(number)
        decode = decoder(engine.tokenizer) if self._splitter is None else self._splitter.decode
        self._text = TextStream(decode, request.stops)
        self._logprobs = request.logprobs
        self._pending: list[tuple[int, TokenLogprob]] = []  # with the number of characters before it
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._made = self._given = 0  # characters of tokens, characters of text

    @property
    def thinks(self) -> bool:
        """Whether the next token is thought and not said."""
        return self._splitter is not None and self._splitter.thinks

    def add(self, step: Token) -> bool:
        """Emit what a token completes; whether the choice has ended with it."""
        ends = step.finish_reason == "stop"  # by an end token, which is no text
        if not ends:
            if self._logprobs is not None:
                self._remember(step, self._logprobs)
            self._say(self._text.add(step.token))
        stopped_by = self._text.stopped_by
        enough = self._splitter is not None and self._splitter.enough
        if step.finish_reason is None and stopped_by is None and not enough:
            return False
        cut = step.finish_reason == "length" and stopped_by is None and not enough
        self._say("" if enough else self._text.finish(), last=True, cut=cut)
        calls = self._splitter is not None and self._splitter.calls > 0
        self._emit(ChoiceEnd(self._number, "length" if cut else "tool_calls" if calls else "stop", stopped_by))
        return True

    def _remember(self, step: Token, logprobs: Logprobs) -> None:
        name = logprobs.named
        top = tuple((name(token), value) for token, value in step.top)
        self._pending.append((self._made, TokenLogprob(name(step.token), step.logprob, top)))
        self._made += len(self._characters.decode(self._pending[-1][1].token.data or b""))

    def _say(self, text: str, *, last: bool = False, cut: bool = False) -> None:
        self._given += len(text)
        if self._text.stopped_by is not None:  # what belongs to the stop string belongs to nothing
            self._pending = [(at, token) for at, token in self._pending if at < self._given]
        for event in self._parts(text, last, cut):
            self._emit(event)
        if last and self._pending:  # tokens without text of their own
            self._emit(Text(self._number, "", self._taken()))

    def _parts(self, text: str, last: bool, cut: bool) -> Iterator[Event]:
        if self._splitter is None:
            if text:
                yield Text(self._number, text, self._taken())
            return
        parts = [*self._splitter.add(text), *(self._splitter.finish(cut) if last else ())]
        tokens = self._taken() if parts else ()  # of markup and thinking, nobody asked for them
        for part in parts:
            if isinstance(part, Text) and tokens:
                part, tokens = dataclasses.replace(part, tokens=tokens), ()
            yield part

    def _taken(self) -> tuple[TokenLogprob, ...]:
        tokens, self._pending = tuple(token for _, token in self._pending), []
        return tokens
