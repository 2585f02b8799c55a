"""From conversations to token ids, through the tokenizer's own chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import one_line, unquoted
from edge0_runtime.contract.model_files import check_library_files, end_ids, read_generation_config, tokenizer_of
from edge0_runtime.contract.prompts import chat_ids
from edge0_runtime.contract.tier import Tier
from edge0_train.data.conversations import Prompt, Refused
from edge0_train.data.rows import TextRow

PLAIN_ROLES = ("system", "user", "assistant")
CARRYING = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Fields of a message, beside its content, without which it would be another message."""


class Chat:
    """A model directory's tokenizer, chat template and end tokens.

    Attributes:
        tokenizer: transformers tokenizer. control_tokens: the texts of its special tokens.
        end_ids: ids that end a reply. pad_id: id for padding (never attended to).
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = directory
        if not (Path(directory) / "tokenizer.json").is_file():
            raise Edge0Error(f"{directory}: has no tokenizer.json; give a model directory with its tokenizer")
        check_library_files(Path(directory))
        # trust_remote_code is said aloud: transformers would otherwise ask for it on a terminal.
        options = {"local_files_only": True, "trust_remote_code": False}
        self.tokenizer: Any = tokenizer_of(
            Path(directory),
            lambda: AutoTokenizer.from_pretrained(str(directory), **options),
            "download its files again",
        )
        if not self.tokenizer.chat_template:
            raise Edge0Error(f"{directory}: has no chat template (chat_template.jinja); add the model's")
        self.end_ids = _end_ids(Path(directory), self.tokenizer)
        pad = self.tokenizer.pad_token_id
        self.pad_id = int(self.end_ids[0] if pad is None else pad)

    def check_vocabulary(self, setting: str, tier: Tier) -> int:
        """Number of ids, padding's among them. Raises Edge0Error if the tier's model, in that setting, has fewer."""
        ids: int = 1 + max(self.pad_id, *self.tokenizer.get_vocab().values())
        vocabulary = tier.architecture["vocab_size"]
        if ids > vocabulary:
            raise Edge0Error(
                f"{setting}: the tokenizer of {self.directory} has {ids:,} ids, but tier {tier.name} a vocabulary of"
                f" {vocabulary:,}; give the tokenizer that belongs to the model"
            )
        return ids

    def prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt as the model sees it, with the opening of the assistant's turn; as the runtime encodes it.

        Raises Refused: the template does not take it, or would leave out a part of it without a word.
        """
        self._check_carrying(prompt)
        ids = self._render(prompt.messages, prompt.tools)
        for role in sorted({message["role"] for message in prompt.messages} - set(PLAIN_ROLES)):
            others = [message for message in prompt.messages if message["role"] != role]
            if self._unchanged(ids, others, prompt.tools):
                raise Refused(f"role {unquoted(role)}, which the chat template has no place for")
        return ids

    def ignored_fields(self, prompt: Prompt) -> list[str]:
        """Names of the messages' further fields (`name`, a date, ...) that change nothing of what the model sees."""
        known = {"role", "content", *CARRYING}
        found = sorted({name for message in prompt.messages for name in message} - known)
        if not found:
            return []
        ids = self._render(prompt.messages, prompt.tools)
        return [name for name in found if self._unchanged(ids, _without(prompt.messages, name), prompt.tools)]

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        try:
            return tuple(chat_ids(self.tokenizer, messages, tools=list(tools) or None))
        except Exception as error:  # a template is a program of the model's: it may raise anything
            raise Refused(f"the chat template refuses it ({one_line(error)})") from error

    def _unchanged(
        self, ids: tuple[int, ...], messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> bool:
        try:
            return self._render(messages, tools) == ids
        except Refused:
            return False

    def _check_carrying(self, prompt: Prompt) -> None:
        """A template that never names a field leaves it out; one that does may leave it out on purpose (old reasoning)."""
        used = {name for message in prompt.messages for name in message if name in CARRYING}
        used |= {"tools"} if prompt.tools else set()
        if used:
            template = self.tokenizer.get_chat_template(tools=list(prompt.tools) or None)
            for name in sorted(used):
                if not re.search(rf"\b{name}\b", template):
                    raise Refused(f"{name}, which the chat template has no place for")

    def text(self, ids: Sequence[int]) -> str:
        """What the ids say, without special tokens."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def shown(self, row: TextRow) -> dict[str, str]:
        """A row as text for samples.jsonl; special tokens stay visible, so that a wrong template shows."""
        prompt, completion = (self.tokenizer.decode(list(ids)) for ids in (row.prompt_ids, row.completion_ids))
        return {
            "prompt": prompt,
            "completion": completion,
            "answer": row.answer,
            "task": row.task,
            "finish_reason": row.finish_reason,
        }


def _without(messages: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    return [{key: value for key, value in message.items() if key != name} for message in messages]


def _end_ids(directory: Path, tokenizer: Any) -> tuple[int, ...]:
    """End tokens of the generation config, or else the tokenizer's."""
    ends = end_ids(read_generation_config(directory)) or end_ids({"eos_token_id": tokenizer.eos_token_id})
    if not ends:
        raise Edge0Error(f"{directory}: names no end token (generation_config.json or tokenizer); add eos_token_id")
    return tuple(ends)
