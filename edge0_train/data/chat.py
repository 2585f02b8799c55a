"""From conversations to token ids, through the tokenizer's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.prompts import chat_ids
from edge0_train.data.prompts import Prompt
from edge0_train.data.rows import TextRow


class Chat:
    """A model directory's tokenizer, chat template and end tokens.

    Attributes:
        tokenizer: transformers tokenizer. end_ids: ids that end a reply. pad_id: id for padding (never attended to).
    """

    def __init__(self, directory: str | Path) -> None:
        if not (Path(directory) / "tokenizer.json").is_file():
            raise Edge0Error(f"{directory}: has no tokenizer.json; give a model directory with its tokenizer")
        # trust_remote_code is said aloud: transformers would otherwise ask for it on a terminal.
        self.tokenizer: Any = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
        if not self.tokenizer.chat_template:
            raise Edge0Error(f"{directory}: has no chat template (chat_template.jinja); add the model's")
        self.end_ids = _end_ids(Path(directory), self.tokenizer)
        pad = self.tokenizer.pad_token_id
        self.pad_id = int(self.end_ids[0] if pad is None else pad)

    def prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt as the model sees it, with the opening of the assistant's turn; as the runtime encodes it."""
        return tuple(chat_ids(self.tokenizer, prompt.messages))

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


def _end_ids(directory: Path, tokenizer: Any) -> tuple[int, ...]:
    """End tokens of the generation config, or else the tokenizer's."""
    ends: Any = None
    if (directory / "generation_config.json").is_file():
        ends = GenerationConfig.from_pretrained(str(directory)).eos_token_id
    if ends is None:
        ends = tokenizer.eos_token_id
    if ends is None:
        raise Edge0Error(f"{directory}: names no end token (generation_config.json or tokenizer); add eos_token_id")
    return tuple(ends) if isinstance(ends, (list, tuple)) else (int(ends),)
