"""The small files of a model directory, which strangers write: read strictly, and checked before a library opens them itself.

transformers and mlx-lm open whatever they find under a name that they know, without a limit: a FIFO blocks them for ever, a list
in place of an object ends in a traceback of theirs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import (
    MAX_TOKENIZER,
    MAX_TOKENIZER_VALUES,
    check_size,
    one_line,
    open_regular,
    raise_problems,
    read_json,
    read_text,
    shown,
)
from edge0_runtime.contract.rendering import MAX_TEMPLATE

COPY = "copy it from the base again"
OBJECTS = (
    "added_tokens.json",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)
"""JSON objects that the libraries parse."""
LISTING_TOKENS = ("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json")
MAX_ADDED_TOKENS = 10_000
"""In a list of them: transformers' time is quadratic in their number; the longest published lists have 6,400."""
OPENED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "additional_chat_templates/*")
"""What the libraries may open beside the weights: by their own download lists, and a tokenizer of several templates."""
HOTTEST = 1e30
"""Of temperatures: computed in float32, where some orders of magnitude more are infinite."""

T = TypeVar("T")
Rule = tuple[Callable[[Any], bool], str]
SAMPLING: Mapping[str, Rule] = {
    "temperature": (lambda value: 0 <= value <= HOTTEST, f"at least 0 and at most {HOTTEST:g}"),
    "top_p": (lambda value: 0 < value <= 1, "larger than 0 and at most 1 (1: off)"),
    "top_k": (lambda value: value == int(value) >= 0, "a whole number of at least 0 (0: off)"),
    "min_p": (lambda value: 0 <= value <= 1, "between 0 and 1 (0: off)"),
}
"""What a sampling parameter may be: (whether a finite number is allowed, that in words)."""


def present(path: Path) -> bool:
    """Whether something lies there; a dangling link is a mistake and not an absent file."""
    return os.path.lexists(path)


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config.json: `text_config`, or all of it."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def read_optional(path: Path) -> dict[str, Any]:
    """A JSON file of a model directory, {} where it isn't there. Raises Edge0Error as `files.read_json`."""
    if not present(path):
        return {}
    if path.name in ("tokenizer.json", "vocab.json"):
        return read_json(path, COPY, MAX_TOKENIZER, MAX_TOKENIZER_VALUES)
    return read_json(path, COPY)


def check_library_files(directory: Path) -> None:
    """Raise one Edge0Error for all files that a library would open, and which are no files of that kind.

    Each must be a regular file of a size that such files have; those of known names strict JSON objects, templates UTF-8.
    """
    problems = []
    for path in sorted({path for pattern in OPENED for path in directory.glob(pattern)}):
        try:
            if path.name in OBJECTS:
                fields = read_optional(path)
                if path.name in LISTING_TOKENS:
                    problems += _too_many_tokens(path, fields)
            elif path.suffix == ".jinja":
                read_text(path, MAX_TEMPLATE)
            else:
                _check_size(path)
        except Edge0Error as problem:
            problems.append(str(problem))
    raise_problems(
        f"{directory}: files that cannot be used", problems, "correct them, or move them out of the directory"
    )


def tokenizer_of(directory: Path, load: Callable[[], T], fix: str) -> T:
    """What a library's `load` makes of a directory's tokenizer files; Edge0Error, ending with `fix`, for whatever it raises."""
    try:
        return load()
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # tokenizers' Rust part
            raise
        raise Edge0Error(f"{directory}: its tokenizer can't be loaded: {one_line(error)}; {fix}") from error


def read_generation_config(directory: Path) -> dict[str, Any]:
    """generation_config.json, {} where there is none; end tokens and sampling checked, values that are null left out.

    Raises one Edge0Error with every field that is wrong.
    """
    path = directory / "generation_config.json"
    config = {name: value for name, value in read_optional(path).items() if value is not None}
    problems = [problem for name in SAMPLING if name in config and (problem := sampling_problem(name, config[name]))]
    problems += end_problems(config)
    raise_problems(f"{path}: values that cannot be served", problems, "correct or remove them")
    return config


def sampling_problem(name: str, value: Any) -> str | None:
    """What is wrong with a sampling parameter, with field, value and fix; None if nothing is."""
    allowed, words = SAMPLING[name]
    if type(value) in (int, float) and math.isfinite(value) and allowed(value):
        return None
    return f"{name}: {shown(value)} must be {words}"


def end_ids(config: Mapping[str, Any]) -> list[int]:
    """The ids of `eos_token_id` in a checked configuration: one, several, or none."""
    value = config.get("eos_token_id")
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def end_problems(config: Mapping[str, Any]) -> list[str]:
    """What is wrong with `eos_token_id`: it is a token id, a list of them, or null."""
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if all(type(one) is int and one >= 0 for one in ids):
        return []
    return [f"eos_token_id: {shown(value)} must be a token id or a list of them"]


def _too_many_tokens(path: Path, fields: Mapping[str, Any]) -> list[str]:
    lists = {name: value for name, value in fields.items() if isinstance(value, (list, dict))} | {"all of it": fields}
    return [
        f"{path}: {shown(name)}: {len(value):,} entries, more than {MAX_ADDED_TOKENS:,}; {COPY}"
        for name, value in lists.items()
        if len(value) > MAX_ADDED_TOKENS
    ]


def _check_size(path: Path) -> None:
    with open_regular(path) as file:
        size = file.seek(0, 2)
    check_size(path, size, MAX_TOKENIZER)
