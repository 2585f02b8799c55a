"""How a token is chosen: what a request may say, what a model says where it doesn't, and the choice itself.

The filters and penalties are mlx-lm's; the random state belongs to the request alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.model_files import read_generation_config, sampling_problem
from edge0_runtime.libraries import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

Sampler = Callable[[mx.array], mx.array]
"""Logits [vocabulary] -> a token's id."""
Processor = Callable[[mx.array, mx.array], mx.array]
"""As mlx-lm has it: ids of the prompt and of the answer so far [T], logits [1, vocabulary] -> logits [1, vocabulary]."""
WHOLE = 2**31 - 1
"""Of the tokens that a penalty looks back at: all of them."""
COLDEST = 1e-36
"""Colder ones take the most likely token, which is their limit: divided by them, log-probabilities are infinite in float32."""


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
        """By generation_config.json, where it is there. Raises Edge0Error as `read_generation_config`."""
        config = read_generation_config(model_dir)
        return cls(**{name: config[name] for name in cls.__dataclass_fields__ if name in config})


@dataclass(frozen=True)
class Penalties:
    """What makes tokens more or less likely than the model has them; the values here change nothing.

    Attributes:
        presence: taken from the logit of every token that the answer has. frequency: as often as the answer has it.
        repetition: divides the positive logits of every token that prompt or answer have, and multiplies the negative ones.
        bias: token id -> what is added to its logit.
    """

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: Mapping[int, float] = field(default_factory=dict)

    def processors(self, prompt_tokens: int) -> list[Processor]:
        """Those of one answer to a prompt of that many tokens; to be made in the thread that generates."""
        of_both = make_logits_processors(
            logit_bias=dict(self.bias),
            repetition_penalty=None if self.repetition == 1 else self.repetition,
            repetition_context_size=WHOLE,
        )
        of_answer = make_logits_processors(
            presence_penalty=self.presence,
            presence_context_size=WHOLE,
            frequency_penalty=self.frequency,
            frequency_context_size=WHOLE,
        )
        return [*of_both, *(_behind(prompt_tokens, process) for process in of_answer)]


def _behind(prompt_tokens: int, process: Processor) -> Processor:
    return lambda tokens_T, logits_1V: process(tokens_T[prompt_tokens:], logits_1V)


def logprobs(logits_V: mx.array) -> mx.array:
    """In fp32, whatever the model computes in."""
    logits_V = logits_V.astype(mx.float32)
    return logits_V - mx.logsumexp(logits_V)


def make_sampler(
    temperature: float, top_p: float, top_k: int, min_p: float, seed: int | None, vocab_size: int
) -> Sampler:
    """A request's sampler: logits [vocabulary] -> token id; every call draws on the request's own key.

    mlx-lm's sampler draws on the process-wide state, so that a seed would not fix a request's tokens.
    """
    chosen = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    for problem in filter(None, (sampling_problem(name, value) for name, value in chosen.items())):
        raise Edge0Error(problem)
    if temperature < COLDEST:
        return mx.argmax
    key = mx.random.key(int.from_bytes(os.urandom(8)) if seed is None else seed % 2**64)

    def sample(logits_V: mx.array) -> mx.array:
        nonlocal key
        key, step_key = mx.random.split(key)
        logprobs_1V = logprobs(logits_V)[None]
        if top_p < 1:
            # Below some 1e-5, a sum over the vocabulary in float32 may leave out every token.
            top_1V = mx.arange(logits_V.size) == mx.argmax(logits_V)
            logprobs_1V = mx.where(top_1V, logprobs_1V, apply_top_p(logprobs_1V, top_p))
        if min_p > 0:
            logprobs_1V = apply_min_p(logprobs_1V, min_p)
        if 0 < top_k < vocab_size:
            logprobs_1V = apply_top_k(logprobs_1V, top_k)
        return mx.random.categorical(logprobs_1V[0] / temperature, key=step_key)

    return sample


def processed(sample: Sampler, processors: Ids[Processor], prompt_ids: Ids[int]) -> Sampler:
    """A sampler behind `processors`, which see every token before the next one is chosen.

    So the token that a call has given is to be evaluated before the next call.
    """
    ids = list(prompt_ids)
    last: mx.array | None = None

    def sample_processed(logits_V: mx.array) -> mx.array:
        nonlocal last
        if last is not None:
            ids.append(int(last))
        tokens_T, logits_1V = mx.array(ids), logits_V.astype(mx.float32)[None]
        for process in processors:
            logits_1V = process(tokens_T, logits_1V)
        last = sample(logits_1V[0])
        return last

    return sample_processed
