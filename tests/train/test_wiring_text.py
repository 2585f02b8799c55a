"""teacher_text as it runs: the published teacher writes, a token at a time what it would write, and the two sides stay apart."""

from __future__ import annotations

import pytest

from edge0_train.data.rows import TextRow, read_data, read_rows
from tests.train.conftest import Make
from tests.train.wiring import Chain, PlainTeacher, Ran


@pytest.fixture(scope="module")
def chain(make_config: Make, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return Chain(make_config, tmp_path_factory.mktemp("wiring"))


@pytest.fixture(scope="module")
def ran(chain: Chain) -> Ran:
    return chain.run(
        "teacher_text",
        "tier.k=1",
        "sample.prompts=12",
        "sample.max_new_tokens=32",
        f"run_dir={chain.root / 'teacher_text'}",
    )


def rows_of(ran: Ran, side: str) -> list[TextRow]:
    return read_rows(ran.directory / f"{side}.jsonl")


def test_completions_are_the_teachers_at_its_own_k(ran: Ran) -> None:
    """Greedy: every token is the largest logit of transformers' own model; at the served K some would be others."""
    rows = rows_of(ran, "train") + rows_of(ran, "held_out")
    teacher, served = PlainTeacher(ran.config), PlainTeacher(ran.config, k=1)
    assert all(teacher.wrote(row) for row in rows) and not all(served.wrote(row) for row in rows)


def test_rows_are_the_prompts_in_order_with_their_answers(ran: Ran) -> None:
    """A completion that ended by itself has its end token, one that was cut off has none."""
    for row in rows_of(ran, "train") + rows_of(ran, "held_out"):
        assert row.task and row.answer
        assert (row.finish_reason == "stop") == (row.completion_ids[-1] == 2)
        assert row.finish_reason == "stop" or len(row.completion_ids) == ran.config.sample.max_new_tokens


def test_no_held_out_prompt_is_trained_on(ran: Ran) -> None:
    train, held_out = ({row.prompt_ids for row in rows_of(ran, side)} for side in ("train", "held_out"))
    assert 0 < len(held_out) <= ran.config.sample.eval_prompts < len(train) and not train & held_out
    data, dropped = read_data(ran.directory, 64)
    assert not dropped and data.card["train"]["rows"] == len(data.train) and data.held_out == rows_of(ran, "held_out")


def test_another_seed_is_another_text(chain: Chain, ran: Ran) -> None:
    other = chain.run("teacher_text", "sample.prompts=12", "seed=4", f"run_dir={chain.root / 'other'}")
    assert {row.prompt_ids for row in rows_of(ran, "train")} != {row.prompt_ids for row in rows_of(other, "train")}
