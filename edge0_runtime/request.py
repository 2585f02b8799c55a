"""One request on a sequence: the prompt in chunks, then token by token."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import Literal, NamedTuple

import mlx.core as mx
import numpy as np

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.prefix.cuts import Prompt
from edge0_runtime.prefix.store import Prefixes
from edge0_runtime.sampling import Sampler, logprobs
from edge0_runtime.sequence import Sequence

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Token:
    """One generated token.

    Attributes:
        index: 0 for the first generated token.
        token: its id. A cancelled request ends with an id of -1: nothing was generated.
        logprob: of the token under the model's own distribution (temperature 1, nothing filtered), in nats.
        finish_reason: set on the last one only; "stop" when the token is an end token (to be left out of the
            text).
        experts: with trace=True: [MoE layers, K], sorted: what the input that led to this token was routed
            to. That input is the prompt's last token for index 0, else the token before.
        logits: with trace=True: float32 [vocabulary].
        cached_tokens: tokens of the prompt that were not processed again, being known from an earlier request.
        top: with top_logprobs: that many of the most likely ids with their log-probabilities, the likeliest first.
    """

    index: int
    token: int
    logprob: float
    finish_reason: FinishReason | None
    experts: np.ndarray | None = None
    logits: np.ndarray | None = None
    top: tuple[tuple[int, float], ...] = ()
    cached_tokens: int = 0


class _Choice(NamedTuple):
    """What a step leads to, maybe not evaluated yet."""

    token: mx.array
    logprob: mx.array
    finite: mx.array
    logits_V: mx.array
    top: tuple[mx.array, ...]

    def arrays(self) -> tuple[mx.array, ...]:
        return (*self[:4], *self.top)


def check(prompt_ids: Ids[int], max_tokens: int, vocab_size: int, context: int) -> None:
    """Raise Edge0Error where a prompt is empty, holds what is no id, or doesn't fit the context together with its answer."""
    if len(prompt_ids) == 0:
        raise Edge0Error("prompt: it has no tokens; give at least one")
    outside = [t for t in prompt_ids if not (isinstance(t, (int, np.integer)) and 0 <= t < vocab_size)]
    if outside:
        raise Edge0Error(f"prompt: {outside[:5]} aren't token ids of this model; they must lie in 0..{vocab_size - 1}")
    if len(prompt_ids) + max_tokens > context:
        raise Edge0Error(
            f"prompt: its {len(prompt_ids)} tokens and max_tokens = {max_tokens} don't fit the context of"
            f" {context}; shorten the prompt or lower max_tokens"
        )


def prefill(
    sequence: Sequence,
    prompt: Prompt,
    width: int,
    cancel: threading.Event,
    prefixes: Prefixes | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> mx.array | None:
    """Logits after the prompt; or None when cancelled.

    It goes pass by pass, and as many passes layer by layer as have `width` tokens. The last token goes alone, as in mlx-lm: then
    the large output projection is computed for it only.

    Args:
        prefixes: what is known of earlier prompts, to go on from the longest that this one begins with.
        progress: hears how many tokens are processed, and how many of those were known.
    """
    keep: set[int] = set()
    if prefixes is not None:
        prefixes.resume(sequence, prompt)
        keep = prefixes.to_keep(sequence, prompt)
    tell = progress or (lambda processed, known: None)
    for passes in _together(prompt.passes(sequence.tokens), width):
        tell(sequence.tokens, sequence.restored)
        ends = list(itertools.accumulate(map(len, passes), initial=sequence.tokens))[1:]
        snapshots = sequence.prefill_chunks(passes, cancel, [n for n, end in enumerate(ends) if end in keep])
        if snapshots is None:
            return None
        if prefixes is not None:
            prefixes.add(sequence, prompt, snapshots)
    tell(sequence.tokens, sequence.restored)
    return None if cancel.is_set() else sequence.prefill(prompt.ids[-1:], last=True)


def _together(passes: Ids[Ids[int]], width: int) -> Iterator[list[Ids[int]]]:
    """Passes in groups of at most `width` tokens, and of one pass at least."""
    group: list[Ids[int]] = []
    for ids in passes:
        if group and sum(map(len, group)) + len(ids) > width:
            yield group
            group = []
        group.append(ids)
    if group:
        yield group


def decode(
    sequence: Sequence,
    logits_V: mx.array,
    max_tokens: int,
    sample: Sampler,
    stop_ids: frozenset[int],
    cancel: threading.Event,
    *,
    ahead: bool,
    trace: bool,
    top: int = 0,
) -> Iterator[Token]:
    """Tokens until one of `stop_ids`, `max_tokens` of them, or a cancelled one.

    Args:
        logits_V: after the prompt. sample: logits -> token id.
        ahead: build a step while the one before computes; only where no expert is waited for.
        trace: fill `Token.experts` and `Token.logits`. top: so many of the most likely tokens in `Token.top`.

    Raises Edge0Error when logits aren't finite.
    """
    choice = _choose(sequence, logits_V, sample, top)
    for index in range(max_tokens):
        if cancel.is_set():
            yield Token(index, -1, 0.0, "cancelled", cached_tokens=sequence.restored)
            return
        following = None
        if ahead and index + 1 < max_tokens:
            mx.async_eval(*choice.arrays())
            following = _choose(sequence, sequence.run(), sample, top)
            mx.async_eval(*following.arrays())
        token, logprob = _read(sequence, choice, ahead, final=index + 1 == max_tokens)
        finish = _finish(token in stop_ids, index + 1 == max_tokens)
        experts = sequence.last.executed() if trace and sequence.last else None
        logits = np.array(choice.logits_V.astype(mx.float32)) if trace else None
        yield Token(index, token, logprob, finish, experts, logits, _ranked(choice), sequence.restored)
        if finish is not None:
            return
        choice = following or _choose(sequence, sequence.decode(token, final=index + 2 == max_tokens), sample, top)


def _choose(sequence: Sequence, logits_V: mx.array, sample: Sampler, top: int) -> _Choice:
    """The next token, not evaluated yet; and what is foreseen of its step."""
    token = sample(logits_V)
    sequence.foresee(token)
    logprobs_V = logprobs(logits_V)
    return _Choice(
        token, logprobs_V[token], mx.isfinite(logits_V).all(), logits_V, _likeliest(logprobs_V, top) if top else ()
    )


def _likeliest(logprobs_V: mx.array, top: int) -> tuple[mx.array, mx.array]:
    """Ids and log-probabilities of that many, in no order."""
    ids = mx.argpartition(-logprobs_V, kth=top - 1)[:top] if top < logprobs_V.size else mx.arange(logprobs_V.size)
    return ids, logprobs_V[ids]


def _ranked(choice: _Choice) -> tuple[tuple[int, float], ...]:
    if not choice.top:
        return ()
    ids, values = (np.array(array) for array in choice.top)
    pairs = ((int(token), float(value)) for token, value in zip(ids, values, strict=True))
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))


def _read(sequence: Sequence, choice: _Choice, ahead: bool, *, final: bool) -> tuple[int, float]:
    """Token and log-probability: a step's one evaluation, what is foreseen of the next one included."""
    if ahead:
        mx.eval(*choice.arrays())
    else:
        sequence.flush(*choice.arrays(), final=final)
    if not choice.finite.item():
        raise Edge0Error("logits: NaN or infinite; check base and adapters with `edge0_runtime verify`")
    return int(choice.token), float(choice.logprob)


def _finish(at_end: bool, at_limit: bool) -> FinishReason | None:
    if at_end:
        return "stop"
    return "length" if at_limit else None
