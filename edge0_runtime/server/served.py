"""A model that is served, as the protocols see it: its name, its prompts, its limits. Everything here is ready for any thread."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.prompts import text_ids
from edge0_runtime.sampling import Penalties
from edge0_runtime.server.errors import ApiError
from edge0_runtime.server.exchange import Logprobs
from edge0_runtime.server.markup import Markup, Splitter
from edge0_runtime.server.settings import Settings
from edge0_runtime.server.vocabulary import Vocabulary
from edge0_runtime.text import chat_ids

if TYPE_CHECKING:
    from edge0_runtime.engine import Engine


class Served:
    """One name that requests may ask for.

    Attributes:
        id: that name. engine: generates for it, in the worker's thread alone. created: when, in Unix seconds.
        settings: of the server. defaults: sampling where a request says nothing. markup: what its answers may be marked up with.
    """

    def __init__(self, name: str, engine: Engine, settings: Settings | None = None) -> None:
        """Raises Edge0Error where the model's generation_config.json can't be served."""
        self.id, self.engine, self.created = name, engine, int(time.time())
        self.settings = settings or Settings()
        self.defaults = dataclasses.replace(engine.defaults, **self.settings.sampling)
        self.markup = Markup(engine.tokenizer)
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.engine.context_length

    def max_tokens(self, asked: int | None, usual: int | None = None) -> int:
        """Of an answer: as a request asks for, else as is set for the server, else the protocol's, else what fits the context."""
        return asked or self.settings.max_tokens or usual or self.context_length

    def conversation(
        self,
        turns: Sequence[Mapping[str, Any]],
        *,
        field: str = "messages",
        continue_final: bool = False,
        **variables: Any,
    ) -> tuple[int, ...]:
        """The ids of a conversation. Raises ApiError, naming the protocol's `field`, where it can't be answered."""
        try:
            ids = chat_ids(self.engine.tokenizer, turns, continue_final=continue_final, **variables)
        except Edge0Error as problem:
            raise ApiError(400, str(problem), field) from problem
        return self._checked(ids, field)

    def raw(self, text: str, field: str) -> tuple[int, ...]:
        """The ids of raw text, in which nothing is a control token."""
        return self._checked(text_ids(self.engine.tokenizer, text), field)

    def given(self, ids: Sequence[int], field: str) -> tuple[int, ...]:
        """Ids that a request names itself. Raises ApiError where one is none of this model's."""
        return self._checked(self.known(ids, field), field)

    def known(self, ids: Sequence[int], field: str) -> Sequence[int]:
        """The same for any number of them."""
        size = self.engine.model.vocab_size
        outside = [token for token in ids if not 0 <= token < size]
        if outside:
            raise ApiError(400, f"{field}: {outside[0]} is no token id; they lie in 0..{size - 1}", field)
        return ids

    def tokens_of(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """A text's ids. `parse_special`: what reads like a control token is one; `add_special`: with what begins every text."""
        tokenizer = self.engine.tokenizer
        encode = tokenizer.encode if parse_special else partial(text_ids, tokenizer)
        ids: list[int] = list(encode(text, add_special_tokens=add_special))
        return ids

    def text_of(self, ids: Sequence[int]) -> str:
        """What ids read like, special tokens included."""
        text: str = self.engine.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        return text

    def splitter(
        self, prompt: Sequence[int], tools: Sequence[Mapping[str, Any]] = (), *, one_call: bool = False
    ) -> Callable[[int], Splitter] | None:
        """What parts an answer to this prompt (`Markup.splitter`); None where there is nothing to part."""
        if not (self.markup.thinks or tools):
            return None
        return lambda choice: self.markup.splitter(choice, prompt, tools, one_call=one_call)

    def logprobs(self, top: int) -> Logprobs:
        """Log-probabilities with that many alternatives. Raises ApiError where the tokenizer can't say its tokens' bytes."""
        return Logprobs(min(top, self.engine.model.vocab_size), self.vocabulary("logprobs").named)

    def penalties(self, presence: float, frequency: float, repetition: float, bias: Mapping[str, float]) -> Penalties:
        """From a request's fields. Raises ApiError where `logit_bias` names what is no token id."""
        size = self.engine.model.vocab_size if bias else 0
        wrong = [token for token in bias if not (token.isascii() and token.isdecimal() and int(token) < size)]
        if wrong:
            message = f"logit_bias: {wrong[0][:20]!r} is no token id; they lie in 0..{size - 1}"
            raise ApiError(400, message, "logit_bias")
        return Penalties(presence, frequency, repetition, {int(token): value for token, value in bias.items()})

    def vocabulary(self, field: str) -> Vocabulary:
        """The tokens' bytes, made when they are first asked for, by whichever `field`."""
        with self._lock:
            if self._vocabulary is None:
                engine = self.engine
                try:
                    self._vocabulary = Vocabulary(engine.tokenizer, engine.model.vocab_size, engine.eos_ids)
                except Edge0Error as problem:
                    raise ApiError(400, f"{field}: {problem}", field) from problem
            return self._vocabulary

    def _checked(self, ids: Sequence[int], field: str) -> tuple[int, ...]:
        limit = self.context_length
        if len(ids) >= limit:
            message = f"{field}: {len(ids)} tokens leave no room to answer in a context of {limit}; shorten them"
            raise ApiError(400, message, field, "context_length_exceeded")
        if not ids:
            raise ApiError(400, f"{field}: there is no token in it; write something", field)
        return tuple(ids)
