"""What OpenAI's chat and its completions write alike: usage, timings, the head of an object."""

from __future__ import annotations

import time
import uuid
from typing import Any

from edge0_runtime.server.exchange import Finished


class Head:
    """The fields with which every object of one answer begins."""

    def __init__(self, prefix: str, model: str) -> None:
        self.id, self.model, self.created = f"{prefix}-{uuid.uuid4().hex}", model, int(time.time())

    def of(self, kind: str) -> dict[str, Any]:
        """For an object of that kind."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def totals(end: Finished) -> dict[str, Any]:
    """`usage` as OpenAI's, and `timings`, an extension: seconds from arrival, what the engine did in them, bytes read."""
    prompt, completion = end.prompt_tokens, end.completion_tokens
    names = ("queued_s", "first_token_s", "total_s", "prefill_s", "decode_s", "blocked_s", "decode_tokens_per_s")
    return {
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": end.cached_tokens},
        },
        "timings": {name: round(getattr(end, name), 6) for name in names} | {"bytes_read": end.bytes_read},
    }
