"""Conversations as ids, for tests of what requests share: turns of random tokens, each ended by the tiny model's end token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edge0_runtime.engine import Engine

END = 2  # <|im_end|>
CHUNK = 24
ROOM = 0.01  # GiB of the prefix cache: for all snapshots of these tests
Step = tuple[int, bytes, bytes]


def turn(seed: int, tokens: int) -> list[int]:
    """A turn of so many tokens, its end included."""
    return [*np.random.default_rng(seed).integers(3, 384, size=tokens - 1).tolist(), END]


SYSTEM, FIRST, ANSWER, SECOND = turn(0, 30), turn(1, 40), turn(2, 17), turn(3, 20)
BEGIN = [7, 8, 9]  # of the answer, as a template writes it
REQUESTS: dict[str, tuple[list[int], int]] = {
    # What somebody does -> (the prompt, how many of its tokens are known by then).
    "begin": ([*SYSTEM, *FIRST, *BEGIN], 0),
    "regenerate": ([*SYSTEM, *FIRST, *BEGIN], 70),
    "go on": ([*SYSTEM, *FIRST, *ANSWER, *SECOND, *BEGIN], 70),
    "regenerate the second": ([*SYSTEM, *FIRST, *ANSWER, *SECOND, *BEGIN], 107),
    "edit the second": ([*SYSTEM, *FIRST, *ANSWER, *turn(4, 33), *BEGIN], 87),
    "begin another conversation": ([*SYSTEM, *turn(5, 21), *BEGIN], 30),
    "a short turn, which no cut follows": ([*SYSTEM, *turn(6, 5), *BEGIN], 30),
    "another system prompt": ([*turn(7, 30), *FIRST, *BEGIN], 0),
}


def load(directory: Path, **flags: Any) -> Engine:
    """An engine whose prompts go in chunks of CHUNK tokens, two of them layer by layer."""
    engine = Engine.load(directory, **flags)
    engine.prefill_chunk, engine.prefill_width = CHUNK, 2 * CHUNK
    return engine


def steps(engine: Engine, prompt: list[int], *, trace: bool = True, **sampling: Any) -> tuple[list[Any], int]:
    """(tokens of an answer with their experts and logits to the bit, how many of the prompt's tokens were known)."""
    tokens = list(engine.generate(prompt, max_tokens=4, ignore_eos=True, trace=trace, **sampling))
    (cached,) = {token.cached_tokens for token in tokens}
    if not trace:
        return [(token.token, token.logprob) for token in tokens], cached
    return [(token.token, token.experts.tobytes(), token.logits.tobytes()) for token in tokens], cached  # type: ignore[union-attr]
