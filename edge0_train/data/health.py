"""Health of generated rows: a model that runs on, repeats itself or grows longer every round makes no training text.

The limits are `sample.max_truncated`, `sample.max_repetitive` and `sample.max_growth`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.config import Sample
from edge0_train.data.rows import TextRow

NGRAM, REPEATED = 4, 0.6
"""A completion repeats itself when more than that share of its 4-grams has occurred in it before."""
LEAST_ROWS = 16
"""Shares of fewer rows are noise: nothing is judged by them."""


@dataclass(frozen=True)
class RowHealth:
    """Of generated rows: mean completion length, share that hit max_new_tokens, share that repeat themselves."""

    rows: int
    mean_length: float
    truncated: float
    repetitive: float

    @classmethod
    def of(cls, rows: Sequence[TextRow]) -> RowHealth:
        """Raises Edge0Error when there are no rows."""
        if not rows:
            raise Edge0Error("sample: no row was generated; check text.prompts and text.max_length")
        count = len(rows)
        return cls(
            rows=count,
            mean_length=round(sum(len(row.completion_ids) for row in rows) / count, 2),
            truncated=round(sum(row.finish_reason == "length" for row in rows) / count, 4),
            repetitive=round(sum(repeats_itself(row.completion_ids) for row in rows) / count, 4),
        )

    def to_dict(self) -> dict[str, float]:
        """{measure: value}, for data cards and metrics."""
        return asdict(self)


def repeats_itself(ids: Sequence[int]) -> bool:
    """Whether most 4-grams of a completion have occurred in it before."""
    return repetition(ids) > REPEATED


def repetition(ids: Sequence[int]) -> float:
    """Share of a completion's 4-grams that it has written before, 0..1 (seq-rep-4 of Welleck et al. 2019)."""
    grams = [tuple(ids[i : i + NGRAM]) for i in range(len(ids) - NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def check_rows(rows: Sequence[TextRow], sample: Sample, what: str, before: RowHealth | None = None) -> RowHealth:
    """The rows' health. Raises Edge0Error (field, value, fix) when a limit of `sample` is passed.

    Args:
        what: who wrote them, for the message: "teacher, train".
        before: health of earlier rows of the same kind (the first round's): the length may not explode against it.
    """
    health = RowHealth.of(rows)
    if health.rows < LEAST_ROWS:
        return health
    if health.truncated > sample.max_truncated:
        raise Edge0Error(
            f"sample.max_truncated: {health.truncated:.0%} of {health.rows} completions ({what}) ran into"
            f" sample.max_new_tokens={sample.max_new_tokens}, allowed are {sample.max_truncated:.0%};"
            " raise sample.max_new_tokens, or look at samples.jsonl: the model may not find its end token"
        )
    if health.repetitive > sample.max_repetitive:
        raise Edge0Error(
            f"sample.max_repetitive: {health.repetitive:.0%} of {health.rows} completions ({what}) repeat themselves,"
            f" allowed are {sample.max_repetitive:.0%}; the model has collapsed: train it longer before this phase,"
            " or lower its learning rate"
        )
    if before and health.mean_length > sample.max_growth * before.mean_length:
        raise Edge0Error(
            f"sample.max_growth: completions ({what}) have {health.mean_length:.1f} tokens on average,"
            f" {health.mean_length / before.mean_length:.1f} times the {before.mean_length:.1f} before,"
            f" allowed are {sample.max_growth}; lower optim.lr, or raise sample.max_growth if longer answers are wanted"
        )
    return health
