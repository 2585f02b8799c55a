"""What an answer must look like, as a mask over the tokens that may come next. Grammars are llguidance's.

A schema comes from a stranger: its size is limited here, what compiling it and each mask may cost by llguidance.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import llguidance
import mlx.core as mx
import numpy as np

from edge0_runtime.contract.files import one_line
from edge0_runtime.sampling import Processor
from edge0_runtime.server.errors import ApiError
from edge0_runtime.server.vocabulary import Vocabulary

MAX_SCHEMA_LENGTH = 64 * 1024
WHITESPACE = r"[\x20\x0A\x09]{0,40}"  # unbounded, a weak model writes nothing else
LIMITS = llguidance.LLParserLimits(verbose_errors=False)


class Grammar:
    """A checked grammar; its processors can be made in any thread."""

    def __init__(self, vocabulary: Vocabulary, grammar: str, field: str, behind: Sequence[int] = ()) -> None:
        """For a request's `field`; with `behind`, it holds from where these tokens have come.

        Raises ApiError where llguidance refuses it.
        """
        self._tokens, self._grammar, self._behind = vocabulary.tokens, grammar, tuple(behind)
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, self._tokens, limits=LIMITS)
        if failed:
            why = one_line(ValueError(messages[0]))
            raise ApiError(400, f"{field}: the grammar can't be followed: {why}; simplify it", field)

    def processor(self, prompt_tokens: int) -> Processor:
        """For one answer to a prompt of that many tokens."""
        matcher = llguidance.LLMatcher(self._tokens, self._grammar, log_level=0, limits=LIMITS)
        return _Mask(matcher, prompt_tokens, self._behind)


class _Mask:
    """Follows an answer token by token and leaves only those that may come next."""

    def __init__(self, matcher: llguidance.LLMatcher, seen: int, behind: tuple[int, ...]) -> None:
        self._matcher, self._seen, self._behind = matcher, seen, behind
        self._holds = not behind

    def __call__(self, tokens_T: mx.array, logits_1V: mx.array) -> mx.array:
        for token in np.array(tokens_T[self._seen :]).tolist():
            if self._holds and not self._matcher.consume_token(token):
                raise RuntimeError(f"grammar: token {token} was masked and has come: {self._matcher.get_error()}")
        self._seen = tokens_T.size
        if not self._holds:
            tail = np.array(tokens_T[-len(self._behind) :]).tolist()
            self._holds = tail == list(self._behind)
        return self._masked(logits_1V) if self._holds else logits_1V

    def _masked(self, logits_1V: mx.array) -> mx.array:
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise RuntimeError(f"grammar: {self._matcher.get_error()}")
        allowed_V = np.unpackbits(words, bitorder="little")[: logits_1V.shape[1]].astype(bool)
        return mx.where(mx.array(allowed_V), logits_1V, -mx.inf)


def json_grammar(schema: Any, field: str) -> str:
    """llguidance's grammar for JSON of a schema. Raises ApiError as `json_schema_text`."""
    text = json_schema_text(schema, field)
    return llguidance.LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE})


def json_schema_text(schema: Any, field: str) -> str:
    """A schema as JSON. Raises ApiError where it is too large, or holds what JSON doesn't."""
    try:
        text = json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError) as problem:
        raise ApiError(400, f"{field}: it is no JSON schema; correct it", field) from problem
    if len(text) > MAX_SCHEMA_LENGTH:
        message = f"{field}: {len(text)} characters are more than {MAX_SCHEMA_LENGTH}; send a smaller schema"
        raise ApiError(400, message, field)
    return text
