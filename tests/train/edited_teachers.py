"""Copies of the embedded teachers that are not quite what they were."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import TEACHER


def edited(
    directory: Path, source: Path | str = TEACHER, *, tensors: Callable[[Any], Any] | None = None, **text: Any
) -> Path:
    """A copy of a teacher with other fields in its text config, and with `tensors` applied to its tensors."""
    shutil.copytree(source, directory)
    config = json.loads((directory / "config.json").read_text())
    config.get("text_config", config).update(text)
    (directory / "config.json").write_text(json.dumps(config))
    if tensors:
        changed = tensors(load_file(str(directory / "model.safetensors")))
        save_file(changed, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def padded(directory: Path, source: Path | str = TEACHER, rows: int = 448) -> Path:
    """A teacher whose embedding (and output head) has random rows beyond the tokenizer's ids, likelier than any other."""

    def pad(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        more = torch.Generator().manual_seed(0)
        for name, value in tensors.items():
            if name.endswith(("embed_tokens.weight", "word_embeddings.weight", "lm_head.weight")):
                extra = torch.randn(rows - value.shape[0], value.shape[1], generator=more)
                tensors[name] = torch.cat([value, (extra * 5 * value.float().std()).to(value.dtype)])
        return tensors

    return edited(directory, source, tensors=pad, vocab_size=rows)
