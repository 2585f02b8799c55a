"""How a token is chosen: what a request may say, what a model says where it doesn't, and the choice itself.

The filters are mlx-lm's; the random state belongs to the request alone.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from edge0_runtime.contract.errors import Edge0Error


@dataclass(frozen=True)
class Sampling:
    """Arguments of `Engine.generate`."""

    max_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None


@dataclass(frozen=True)
class Defaults:
    """Sampling where a request says nothing: the model's generation_config.json, else OpenAI's values."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @classmethod
    def of_model(cls, model_dir: Path) -> Defaults:
        """By generation_config.json, where it is there. Raises Edge0Error: no JSON, or a value that is no number."""
        path = model_dir / "generation_config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except ValueError as problem:
            raise Edge0Error(f"{path}: not valid JSON: {problem}; correct or remove it") from problem
        found = {name: config[name] for name in cls.__dataclass_fields__ if config.get(name) is not None}
        strangers = {name: value for name, value in found.items() if type(value) not in (int, float)}
        if strangers:
            raise Edge0Error(f"{path}: {strangers} must be numbers; correct or remove them")
        return cls(**found)


def logprobs(logits_V: mx.array) -> mx.array:
    """In fp32, whatever the model computes in."""
    logits_V = logits_V.astype(mx.float32)
    return logits_V - mx.logsumexp(logits_V)


def make_sampler(
    temperature: float, top_p: float, top_k: int, min_p: float, seed: int | None, vocab_size: int
) -> Callable[[mx.array], mx.array]:
    """A request's sampler: logits [vocabulary] -> token id; every call draws on the request's own key.

    mlx-lm's sampler draws on the process-wide state, so that a seed would not fix a request's tokens.
    """
    for name, value, allowed, text in (
        ("temperature", temperature, 0 <= temperature < math.inf, "at least 0"),
        ("top_p", top_p, 0 < top_p <= 1, "larger than 0 and at most 1"),
        ("top_k", top_k, top_k >= 0, "at least 0 (0: off)"),
        ("min_p", min_p, 0 <= min_p <= 1, "between 0 and 1 (0: off)"),
    ):
        if not allowed:
            raise Edge0Error(f"{name}: {value!r} must be {text}")
    if temperature == 0:
        return mx.argmax
    key = mx.random.key(int.from_bytes(os.urandom(8)) if seed is None else seed % 2**64)

    def sample(logits_V: mx.array) -> mx.array:
        nonlocal key
        key, step_key = mx.random.split(key)
        logprobs_1V = logprobs(logits_V)[None]
        if top_p < 1:
            logprobs_1V = apply_top_p(logprobs_1V, top_p)
        if min_p > 0:
            logprobs_1V = apply_min_p(logprobs_1V, min_p)
        if 0 < top_k < vocab_size:
            logprobs_1V = apply_top_k(logprobs_1V, top_k)
        return mx.random.categorical(logprobs_1V[0] / temperature, key=step_key)

    return sample
