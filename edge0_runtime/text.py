"""Between text and token ids: chat prompts in, text pieces out.

A `TextStream` is the only way from tokens to text, streamed or not, so both give the same characters. It
holds back what a later token may still change: an unfinished character, the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from edge0_runtime.contract import prompts
from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import one_line, raise_problems, read_text
from edge0_runtime.contract.model_files import COPY, end_ids, end_problems, read_generation_config, tokenizer_of
from edge0_runtime.contract.rendering import MAX_TEMPLATE
from edge0_runtime.libraries import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig

if TYPE_CHECKING:
    from edge0_runtime.libraries import PreTrainedTokenizerBase

Decode = Callable[[list[int]], str]
REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not (yet) a character
MAX_PENDING = 3  # a UTF-8 character has at most 4 bytes, so at most 3 can be waiting for the last one


def load_tokenizer(directory: Path, config: Mapping[str, Any], template: Path | None = None) -> PreTrainedTokenizerBase:
    """A model directory's tokenizer, as training has it; code in the directory is never run.

    `template`: a file whose chat template takes the place of the model's.

    Its files are to be checked before (`check_library_files`); `config` is what config.json holds. Raises Edge0Error where the
    library can't make a tokenizer of them, or where the chat template fails on one question.
    """
    known = _configuration(directory, config)
    # trust_remote_code is said aloud: transformers would otherwise ask for it on a terminal.
    options = {"config": known, "local_files_only": True, "trust_remote_code": False}
    tokenizer = tokenizer_of(directory, lambda: AutoTokenizer.from_pretrained(str(directory), **options), COPY)
    if template is not None:
        tokenizer.chat_template = read_text(template, MAX_TEMPLATE)
        if not tokenizer.chat_template.strip():
            raise Edge0Error(f"{template}: it is empty; give a jinja template, or leave out --chat-template")
    if tokenizer.chat_template:
        try:
            chat_ids(tokenizer, [{"role": "user", "content": "Hello"}])
        except _RefusedError:
            pass  # by the template's own word: it may want a system turn first
        except Edge0Error as error:
            raise Edge0Error(f"{template or directory}: {error}") from error
    return tokenizer


def _configuration(directory: Path, config: Mapping[str, Any]) -> PreTrainedConfig:
    """All of config.json that decides which class a tokenizer has.

    Left alone, transformers makes the model's whole configuration, and of two billion layers or labels that takes all memory.
    """
    kind = config.get("model_type")
    known = CONFIG_MAPPING[kind]() if isinstance(kind, str) and kind in CONFIG_MAPPING else PreTrainedConfig()
    for name in ("model_type", "model_name", "tokenizer_class"):
        if isinstance(config.get(name), str):
            setattr(known, name, config[name])
    known._name_or_path = str(directory)
    return known


class _RefusedError(Edge0Error):
    """A template called raise_exception."""


def chat_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    continue_final: bool = False,
    **variables: Any,
) -> list[int]:
    """Token ids of a conversation in the model's own chat template, ready for the assistant's answer.

    `continue_final` and `variables` are those of `prompts.chat_ids`. Raises Edge0Error where the model has no template, or the
    template refuses the conversation or fails on it.
    """
    if not tokenizer.chat_template:
        raise Edge0Error("chat template: this model has none; use `edge0_runtime generate` with raw text")
    try:
        return prompts.chat_ids(tokenizer, messages, continue_final=continue_final, **variables)
    except Exception as error:  # a template is a program of a stranger's
        if type(error) is TemplateError:
            raise _RefusedError(f"messages: the model's chat template refuses them: {one_line(error)}") from error
        raise Edge0Error(
            f"chat template: fails with {type(error).__name__}: {one_line(error)}; correct the template, or remove it and use"
            " `edge0_runtime generate`"
        ) from error


def end_tokens(checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """End tokens: the union of what generation_config.json, config.json and the tokenizer name; Edge0Error where one is no id."""
    text = checkpoint.text_config()
    problems = dict.fromkeys([*end_problems(checkpoint.config), *end_problems(text)])
    raise_problems(f"{checkpoint.directory / 'config.json'}: values that cannot be served", problems, COPY)
    sources = (read_generation_config(checkpoint.directory), checkpoint.config, text)
    ends = {token for config in sources for token in end_ids(config)}
    return frozenset(ends if tokenizer.eos_token_id is None else ends | {tokenizer.eos_token_id})


def decoder(tokenizer: Any, shown: frozenset[int] = frozenset()) -> Decode:
    """ids -> text: without special tokens except those `shown`, and with the spaces that the model wrote."""
    hidden = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special} - shown

    def decode(ids: list[int]) -> str:
        visible = [token for token in ids if token not in hidden] if shown else ids
        text: str = tokenizer.decode(visible, skip_special_tokens=not shown, clean_up_tokenization_spaces=False)
        return text

    return decode


class TextStream:
    """Text of one answer, token by token. `add` returns what is final; `stopped_by`: the stop string that has come."""

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._characters = _Characters(decode)
        self._stops = _Stops(stops)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that has come, None before; what follows it is not the answer's."""
        return self._stops.reached

    def add(self, token: int) -> str:
        """The text that `token` completes; often empty."""
        return self._stops.feed(self._characters.add(token))

    def finish(self) -> str:
        """What was held back. An unfinished character at the very end comes out once, as U+FFFD."""
        return self._stops.feed(self._characters.finish()) + self._stops.finish()


class _Characters:
    """Tokens to whole characters.

    The last window of tokens is decoded again with each new token, since a decoder may treat the first token
    of a text in its own way (a stripped leading space) and a character may span tokens. mlx-lm's streaming
    detokenisers drop the leading space of an answer, which decoding it as a whole keeps.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._given = ""  # the part of decode(window) that was handed out

    def add(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)[len(self._given) :]
        whole = text.rstrip(REPLACEMENT)
        # More replacements than one unfinished character can cause: the model really wrote broken bytes.
        whole = max(whole, text[:-MAX_PENDING], key=len)
        self._given += whole
        if whole and len(whole) == len(text):  # nothing pending: one token is enough context for the next
            self._window = [token]
            self._given = self._decode(self._window)
        return whole

    def finish(self) -> str:
        rest = self._decode(self._window)[len(self._given) :]
        self._given += rest
        return rest


class _Stops:
    """Cuts text before the stop string that is completed first (the longest of those that end together)."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.reached: str | None = None

    def feed(self, text: str) -> str:
        if self.reached is not None:
            return ""
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, cut, self.reached = min(found)
        else:
            cut = len(self._held) - max((_overlap(self._held, stop) for stop in self._stops), default=0)
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def finish(self) -> str:
        rest, self._held = ("" if self.reached is not None else self._held), ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, `stop` itself excluded."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
