"""A tokenizer's tokens as bytes, by llguidance: for log-probabilities, and for grammars."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import one_line
from edge0_runtime.server.exchange import TokenName


class Vocabulary:
    """Of one model; making it takes about a second for 150,000 tokens."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Iterable[int]) -> None:
        """Raises Edge0Error where llguidance can't read the tokenizer."""
        from llguidance import hf  # imports transformers by itself, so late

        try:
            self.tokens = hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=sorted(end_ids) or None)
        except Exception as error:
            raise Edge0Error(f"this model's tokenizer has no bytes to show: {one_line(error)}; leave it out") from error

    def named(self, token: int) -> TokenName:
        """A token's name and bytes, which need not be whole characters."""
        data: bytes = self.tokens.decode_bytes([token])
        return TokenName(data.decode("utf-8", "replace"), None if self.tokens.is_special_token(token) else data)
