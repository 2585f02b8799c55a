"""How many rows of which lengths a phase trains on, as its plan counts them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge0_train.config import Config
from edge0_train.data.rows import TextData, TextRow, text_of


@dataclass(frozen=True)
class Rows:
    """The rows that a phase trains on.

    Attributes:
        train, held_out: how many. dropped: {reason: how many}.
        mean, longest: inputs a row. labels: mean number of a row's tokens that the loss is summed over.
        writer: the teacher that wrote them, as their card says.
        assumed: there is no text yet (a dry run): every row is taken to be as long as text.max_length.
    """

    train: int
    held_out: int
    mean: float
    labels: float
    longest: int
    dropped: Mapping[str, int]
    writer: str = ""
    assumed: bool = False

    @classmethod
    def of(cls, train: Sequence[TextRow], held_out: int, dropped: Mapping[str, int]) -> Rows:
        """Of train rows that are there; a row of n tokens has n - 1 inputs."""
        inputs = [row.length - 1 for row in train]
        labels = sum(len(row.completion_ids) for row in train) / len(train)
        return cls(len(train), held_out, sum(inputs) / len(train), labels, max(inputs), dropped)

    @classmethod
    def planned(cls, config: Config) -> Rows:
        """For a dry run: the rows of text.rows if they are there, else the most that configuration allows."""
        if (Path(config.text.rows) / "card.json").is_file():
            data, dropped = text_of(config)
            return cls.of_data(data, dropped)
        return cls.unwritten(config)

    @classmethod
    def unwritten(cls, config: Config) -> Rows:
        """The most that configuration allows, where no text is read."""
        longest = config.text.max_length - 1
        labels = float(min(longest, config.sample.max_new_tokens))
        return cls(config.sample.prompts, config.sample.eval_prompts, longest, labels, longest, {}, assumed=True)

    @classmethod
    def of_data(cls, data: TextData, dropped: Mapping[str, int]) -> Rows:
        """Of what `text_of` returns."""
        return dataclasses.replace(cls.of(data.train, len(data.held_out), dropped), writer=data.teacher.id)
