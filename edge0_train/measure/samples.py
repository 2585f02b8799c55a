"""What a trained student writes, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edge0_train.build import Student
from edge0_train.config import Config
from edge0_train.data.rows import TextRow
from edge0_train.student import Decoding, generate

SAMPLE_TOKENS = 256
"""The most tokens that a sample may take."""


def greedy_samples(config: Config, student: Student, rows: Sequence[TextRow]) -> list[dict[str, str]]:
    """The student's greedy completions of the rows' prompts, for samples.jsonl."""
    completions = generate(
        student.path,
        [row.prompt_ids for row in rows],
        Decoding(min(config.sample.max_new_tokens, SAMPLE_TOKENS)),
        end_ids=student.chat.end_ids,
        pad_id=student.chat.pad_id,
    )
    return [
        student.chat.shown(replace(row, completion_ids=done.ids, finish_reason=done.finish_reason))
        for row, done in zip(rows, completions, strict=True)
    ]
