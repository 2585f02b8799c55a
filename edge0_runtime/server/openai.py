"""What OpenAI's endpoints write alike: usage, timings, the head of an object."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from edge0_runtime.server.answer import sse
from edge0_runtime.server.errors import ApiError
from edge0_runtime.server.exchange import Finished, Progress, TokenLogprob, TokenName


class Head:
    """The fields with which every object of one answer begins."""

    def __init__(self, prefix: str, model: str) -> None:
        self.id, self.model, self.created = f"{prefix}-{uuid.uuid4().hex}", model, int(time.time())

    def of(self, kind: str) -> dict[str, Any]:
        """For an object of that kind."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class ChunkWriter:
    """What both kinds of completion do alike: a stream of chunks of `kind`, usage where asked for, [DONE]."""

    def __init__(self, prefix: str, model: str, kind: str, include_usage: bool) -> None:
        self._head = Head(prefix, model)
        self.id = self._head.id
        self._kind, self._include_usage = kind, include_usage

    def failed(self, problem: ApiError) -> str:
        """OpenAI's error object."""
        return sse(problem.openai())

    def _chunk(self, choice: dict[str, Any], extra: dict[str, Any] | None = None) -> str:
        usage = {"usage": None} if self._include_usage else {}
        return sse(self._head.of(self._kind) | {"choices": [choice]} | usage | (extra or {}))

    def _last(self, end: Finished) -> Iterator[str]:
        if self._include_usage:
            yield sse(self._head.of(self._kind) | {"choices": []} | totals(end))
        yield "data: [DONE]\n\n"


def progress(event: Progress) -> dict[str, Any]:
    """llama.cpp's `prompt_progress`."""
    told = {"total": event.total, "cache": event.cached, "processed": event.processed}
    return {"prompt_progress": told | {"time_ms": round(event.seconds * 1000)}}


def totals(end: Finished) -> dict[str, Any]:
    """`usage` as OpenAI's, and `timings`."""
    prompt, completion = end.prompt_tokens, end.completion_tokens
    return {
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": end.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": end.thinking_tokens},
        },
        "timings": timings(end),
    }


def timings(end: Finished) -> dict[str, float]:
    """An extension of all protocols: seconds from arrival, what the engine did in them, bytes read of experts."""
    names = ("queued_s", "first_token_s", "total_s", "prefill_s", "decode_s", "blocked_s", "decode_tokens_per_s")
    return {name: round(getattr(end, name), 6) for name in names} | {"bytes_read": end.bytes_read}


def told_tokens(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Tokens with their log-probabilities and the likeliest in their places, as chat and responses show them."""
    return [_named(one.token, one.logprob) | {"top_logprobs": [_named(*top) for top in one.top]} for one in tokens]


def _named(token: TokenName, logprob: float) -> dict[str, Any]:
    return {"token": token.name, "logprob": logprob, "bytes": None if token.data is None else list(token.data)}
