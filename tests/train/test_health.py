"""Generated rows that are no text stop the run: the message names field, value and fix."""

from __future__ import annotations

import dataclasses
import random

import pytest

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.data.health import LEAST_ROWS, RowHealth, check_rows, repeats_itself
from edge0_train.data.rows import TextRow
from tests.train.conftest import Make, task_rows


def row(completion: list[int], reason: str = "stop") -> TextRow:
    return TextRow((1, 2), tuple(completion), reason)


RANDOM = random.Random(0)
GOOD = [row([RANDOM.randrange(300) for _ in range(20 + n % 5)]) for n in range(40)]


@pytest.fixture
def sample(make_config: Make):
    config = make_config("teacher_text", "sample.max_truncated=0.5", "sample.max_repetitive=0.25")
    return dataclasses.replace(config.sample, max_growth=2.0)


def test_good_rows_pass_and_are_described(sample):
    health = check_rows(GOOD, sample, "teacher")
    assert health == RowHealth(40, 22.0, 0.0, 0.0)
    assert check_rows(task_rows("train", 40), sample, "teacher").repetitive == 0.0  # arithmetic is not a collapse


@pytest.mark.parametrize(
    ("ids", "repeats"),
    [
        ([7] * 30, True),
        ([1, 2, 3] * 10, True),
        (list(range(30)), False),
        ([*range(20), *range(20)], False),
        ([5], False),
        ([], False),
        ([5] * 4, False),
    ],
)
def test_what_repeats_itself(ids, repeats):
    assert repeats_itself(ids) is repeats
    grams = [ids[i : i + 4] for i in range(len(ids) - 3)]  # the slow plain count
    seen = sum(gram in grams[:i] for i, gram in enumerate(grams))
    assert (len(grams) > 0 and seen / len(grams) > 0.6) is repeats


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row([1, 2, 3], "length")] * 21 + GOOD[:19], ["sample.max_truncated", "52%", "50%", "max_new_tokens=44", "raise"]),
        ([row([9] * 40)] * 11 + GOOD[:29], ["sample.max_repetitive", "28%", "25%", "train it longer"]),
    ],
)  # fmt: skip
def test_collapse_is_one_sentence(sample, rows, words):
    with pytest.raises(Edge0Error) as error:
        check_rows(rows, sample, "round 3")
    message = str(error.value)
    assert "\n" not in message and "round 3" in message
    assert all(word in message for word in words), message


def test_length_explosion_is_measured_against_the_first_round(sample):
    before = RowHealth.of(GOOD)
    long = [row(list(range(n, n + 45))) for n in range(40)]
    assert check_rows(long, sample, "round 1").mean_length == 45.0  # nothing to compare with
    with pytest.raises(Edge0Error, match=r"sample\.max_growth: .*45\.0 tokens.*2\.0 times the 22\.0 before.*optim\.lr"):
        check_rows(long, sample, "round 1", before)
    assert check_rows([row(list(range(44)))] * 40, sample, "round 1", before)


def test_few_rows_are_not_judged(sample):
    bad = [row([1] * 44, "length")]
    assert check_rows(bad * (LEAST_ROWS - 1), sample, "x").truncated == 1.0
    with pytest.raises(Edge0Error):
        check_rows(bad * LEAST_ROWS, sample, "x")
    with pytest.raises(Edge0Error, match=r"text\.prompts"):
        check_rows([], sample, "x")
