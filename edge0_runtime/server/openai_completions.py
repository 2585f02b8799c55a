"""POST /v1/completions: raw text or token ids go on, in OpenAI's older shape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from pydantic import BeforeValidator, Field, model_validator

from edge0_runtime.server.exchange import (
    Choice,
    ChoiceEnd,
    Event,
    Finished,
    GenerationRequest,
    Progress,
    Text,
    TokenLogprob,
    TokenName,
)
from edge0_runtime.server.openai import ChunkWriter, progress, totals
from edge0_runtime.server.schema import Characters, OpenAIRequest, only
from edge0_runtime.server.served import Served
from edge0_runtime.server.service import Service

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 8
MAX_LOGPROBS = 20


def _prompts(value: Any) -> Any:
    """One prompt or several, each a string or token ids: always a list of prompts."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(type(one) is int for one in value)):
        return [value]
    return value


Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class CompletionRequest(OpenAIRequest):
    """Body of POST /v1/completions."""

    prompt: Annotated[list[Characters | Ids], BeforeValidator(_prompts), Field(min_length=1, max_length=MAX_PROMPTS)]
    echo: bool = False
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    best_of: Annotated[int | None, Field(ge=1)] = None

    # Refused, unless set to what an answer is like anyway.
    suffix: Annotated[Any, only("")] = None

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError(f"best_of {self.best_of} must equal n {self.n}; leave it out")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs: a prompt's log-probabilities are not computed; leave one of them out")
        return self

    def request(self, served: Served) -> GenerationRequest:
        """As the server's own. Raises ApiError where this model can't answer it."""
        return GenerationRequest(
            prompts=tuple(self._ids(served, one) for one in self.prompt),
            sampling=self.sampling(served, served.max_tokens(self.max_tokens, DEFAULT_MAX_TOKENS)),
            penalties=self.penalties(served),
            n=self.n,
            stops=tuple(self.stop),
            logprobs=None if self.logprobs is None else served.logprobs(self.logprobs),
            progress=self.return_progress,
        )

    def echoes(self, served: Served) -> list[str]:
        """What is put before each prompt's answers."""
        if not self.echo:
            return [""] * len(self.prompt)
        return [one if isinstance(one, str) else served.text_of(one) for one in self.prompt]

    def _ids(self, served: Served, prompt: str | list[int]) -> tuple[int, ...]:
        return served.raw(prompt, "prompt") if isinstance(prompt, str) else served.given(prompt, "prompt")


def add_routes(app: FastAPI, service: Service) -> None:
    """The endpoint, on the app."""

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        served = service.model(body.model)
        wanted, echoes = await service.prepare(lambda: (body.request(served), body.echoes(served)))
        before = [text for text in echoes for _ in range(body.n)]
        writer = CompletionWriter(served.id, before, body.logprobs is not None, body.stream_options.include_usage)
        return await service.answer(request, served, wanted, writer, stream=body.stream)


class CompletionWriter(ChunkWriter):
    """OpenAI's text completion. `before`: a choice's number -> the text that it begins with."""

    def __init__(self, model: str, before: Sequence[str], logprobs: bool, include_usage: bool) -> None:
        super().__init__("cmpl", model, "text_completion", include_usage)
        self._before, self._logprobs = before, logprobs
        self._offsets = [len(text) for text in before]  # in characters, where a choice's next text begins

    def whole(self, choices: Sequence[Choice], end: Finished) -> dict[str, Any]:
        """One text_completion."""
        listed = [
            self._choice(number, self._before[number] + choice.text, choice.tokens, choice.reason)
            for number, choice in enumerate(choices)
        ]
        return self._head.of("text_completion") | {"choices": listed} | totals(end)

    def begin(self) -> Iterable[str]:
        """The prompts, where they are to be echoed."""
        return [self._chunk(self._choice(number, text)) for number, text in enumerate(self._before) if text]

    def write(self, event: Event) -> Iterator[str]:
        """Chunks for one event."""
        match event:
            case Progress(number):
                yield self._chunk(self._choice(number, ""), progress(event))
            case Text(number, text, tokens):
                yield self._chunk(self._choice(number, text, tokens))
            case ChoiceEnd(number, reason):
                yield self._chunk(self._choice(number, "", (), reason))
            case Finished():
                yield from self._last(event)
            case _:
                pass

    def _choice(
        self, number: int, text: str, tokens: Sequence[TokenLogprob] = (), reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": number, "text": text, "logprobs": self._told(number, tokens), "finish_reason": reason}

    def _told(self, number: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """The older shape: lists side by side."""
        if not self._logprobs:
            return None
        names, offsets = [_name(one.token) for one in tokens], []
        for name in names:
            offsets.append(self._offsets[number])
            self._offsets[number] += len(name)
        return {
            "tokens": names,
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [{_name(token): value for token, value in one.top} for one in tokens],
            "text_offset": offsets,
        }


def _name(token: TokenName) -> str:
    """The token's text; one that is no whole characters as OpenAI writes it."""
    if token.data is None or "\ufffd" not in token.name:
        return token.name
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)
