"""What people wrote becomes token ids, and never control tokens: only the chat template may open or end a turn.

Training and serving both encode here, so that a served conversation has the ids that were trained. A tokenizer is transformers'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from edge0_runtime.contract.rendering import rendered


def chat_ids(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, continue_final: bool = False, **variables: Any
) -> list[int]:
    """Ids of a conversation in the model's chat template, up to the opening of the assistant's turn.

    Args:
        tokenizer: transformers'.
        messages: the turns. variables: what else the template is given, e.g. `tools`.
        continue_final: the last turn stays open, to be gone on with, instead of a new one being opened.

    A control token's text inside a message is text: it is marked before the template writes its own, and the tokenizer sees the
    prompt cut at the marks. A conversation without any is tokenised in one piece. Raises whatever the template raises, and as
    `rendered`.
    """
    control = control_texts(tokenizer)
    mark = _unused("".join(_strings([messages, variables])))
    turns, others = _each_string([messages, variables], lambda text: mark.join(_pieces(text, control)))
    opening = {"continue_final_message": True} if continue_final else {}
    prompt = rendered(
        lambda: tokenizer.apply_chat_template(
            turns, add_generation_prompt=not continue_final, tokenize=False, **opening, **others
        )
    )
    return [token for piece in prompt.split(mark) for token in tokenizer.encode(piece, add_special_tokens=False)]


def text_ids(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Ids of raw text, which holds no control token; with what the tokenizer puts at the beginning of every text."""
    first, *rest = _pieces(text, control_texts(tokenizer))
    ids: list[int] = tokenizer.encode(first, add_special_tokens=add_special_tokens)
    return ids + [token for piece in rest for token in tokenizer.encode(piece, add_special_tokens=False)]


def control_texts(tokenizer: Any) -> frozenset[str]:
    """The texts that a tokenizer takes for control tokens: those that decoding leaves out of an answer."""
    tokens = tokenizer.added_tokens_decoder.values()
    return frozenset(token.content for token in tokens if token.special)


def _pieces(text: str, control: frozenset[str]) -> list[str]:
    """The text, cut after the first character of everything in it that reads like a control token."""
    begins, lengths = {token[:1] for token in control}, {len(token) for token in control}
    cuts = [
        at + 1
        for at, character in enumerate(text)
        if character in begins and any(text[at : at + length] in control for length in lengths)
    ]
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def _unused(text: str) -> str:
    """A mark that the text doesn't hold, of a character that Unicode keeps free for a program's own use."""
    mark = "\ufdd0"
    while mark in text:
        mark += "\ufdd0"
    return mark


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _strings(one)


def _each_string(value: Any, change: Callable[[str], str]) -> Any:
    """The same lists and mappings with every string changed; keys are not."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _each_string(one, change) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_each_string(one, change) for one in value]
    return value
