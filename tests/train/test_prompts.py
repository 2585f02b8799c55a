"""Prompts: nothing is lost, moved between splits or changed without being said."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.data import tasks
from edge0_train.data.conversations import Prompt
from edge0_train.data.prompts import Limit, load_prompts


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def texts(prompts: list[Prompt]) -> set[str]:
    return {json.dumps(p.messages) for p in prompts}


QUESTIONS = [{"messages": user(f"Question {n}?"), "task": "q", "answer": str(n)} for n in range(300)]


def test_tasks_are_split_and_checkable():
    prompts = load_prompts("tasks", train=200, held_out=50, seed=0)
    assert (len(prompts.train), len(prompts.held_out)) == (200, 50) and not prompts.dropped
    assert not texts(prompts.train) & texts(prompts.held_out)
    other = load_prompts("tasks", train=200, held_out=50, seed=1)
    assert texts(other.train) != texts(prompts.train)
    assert not texts(other.train) & texts(prompts.held_out) and not texts(prompts.train) & texts(other.held_out)
    assert prompts == load_prompts("tasks", train=200, held_out=50, seed=0)
    assert all(p.task in tasks.TASKS and p.answer for p in [*prompts.train, *prompts.held_out])


def test_some_tasks_are_chosen_by_name_and_unknown_ones_refused():
    prompts = load_prompts("tasks:chain,add", train=50, held_out=20, seed=0)
    assert {p.task for p in [*prompts.train, *prompts.held_out]} == {"chain", "add"}
    assert "chain" not in {p.task for p in load_prompts("tasks", train=200, held_out=50, seed=0).train}
    with pytest.raises(Edge0Error, match=r"text.prompts: tasks:chains: .*'chains'; use names from add"):
        load_prompts("tasks:chains", train=1, held_out=1, seed=0)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_files_are_split_by_content_alone(tmp_path, kind):
    """Neither seed nor order nor limits nor neighbours move a prompt to the other side."""

    def write(name: str, rows: list[dict[str, Any]]) -> str:
        path = tmp_path / f"{name}.{kind}"
        if kind == "jsonl":
            return jsonl(path, rows)
        Dataset.from_list(rows).to_parquet(str(path))
        return str(path)

    whole = load_prompts(write("all", QUESTIONS), train=1000, held_out=1000, seed=0)
    assert len(whole.train) + len(whole.held_out) == 300 and not whole.dropped
    assert 10 <= len(whole.held_out) <= 60  # one in ten
    assert not texts(whole.train) & texts(whole.held_out)
    for name, rows, limits, seed in (
        ("reversed", QUESTIONS[::-1], (1000, 1000), 0),
        ("part", QUESTIONS[50:250], (1000, 1000), 3),
        ("few", QUESTIONS, (40, 5), 7),
    ):
        other = load_prompts(write(name, rows), train=limits[0], held_out=limits[1], seed=seed)
        assert texts(other.train) <= texts(whole.train) and texts(other.held_out) <= texts(whole.held_out)
        assert len(other.train) <= limits[0] and len(other.held_out) <= limits[1]
    assert {p.answer for p in whole.train} | {p.answer for p in whole.held_out} == {str(n) for n in range(300)}


def test_the_seed_orders_the_train_side(tmp_path):
    source = jsonl(tmp_path / "q.jsonl", QUESTIONS)
    first, again, other = (load_prompts(source, train=99, held_out=9, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.train != other.train and texts(first.train) == texts(other.train)
    assert len(first.train) == 99 and len(first.held_out) == 9


def test_both_kinds_of_file_give_the_same_prompts(tmp_path):
    Dataset.from_list(QUESTIONS).to_parquet(str(tmp_path / "q.parquet"))
    sources = jsonl(tmp_path / "q.jsonl", QUESTIONS), str(tmp_path / "q.parquet")
    a, b = (load_prompts(source, train=500, held_out=500, seed=0) for source in sources)
    assert a == b


def test_a_conversation_ends_with_its_last_user_turn(tmp_path):
    """The reply to learn is the teacher's, never the file's."""
    rows = [
        {"messages": [{"role": "system", "content": "s"}, *user(f"a{n}"), {"role": "assistant", "content": "b"}, *user("c"),
                      {"role": "assistant", "content": "d"}]}
        for n in range(60)
    ]  # fmt: skip
    prompts = load_prompts(jsonl(tmp_path / "c.jsonl", rows), train=100, held_out=100, seed=0)
    for prompt in [*prompts.train, *prompts.held_out]:
        assert [m["role"] for m in prompt.messages] == ["system", "user", "assistant", "user"]
        assert prompt.messages[-1]["content"] == "c" and prompt.answer == "" and prompt.task == ""


def test_duplicates_and_bad_rows_are_counted(tmp_path):
    bad: list[Any] = [
        {"messages": []},
        {"messages": None},
        {"messages": [{"role": "assistant", "content": "hello"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": None, "content": "hm"}]},
    ]
    source = jsonl(tmp_path / "q.jsonl", [*QUESTIONS[:100], *bad, *QUESTIONS[:7], *QUESTIONS[100:]])
    prompts = load_prompts(source, train=1000, held_out=1000, seed=0)
    assert len(prompts.train) + len(prompts.held_out) == 300
    assert prompts.dropped == {
        "no messages": 2,
        "no user turn": 1,
        "a message without role or content": 2,
        "duplicate prompt": 7,
    }


def test_rows_without_messages_and_an_empty_file_are_errors(tmp_path):
    cases = {
        "text": jsonl(tmp_path / "text.jsonl", [{"text": f"row {n}"} for n in range(20)]),
        "empty": jsonl(tmp_path / "empty.jsonl", []),
        "one side": jsonl(tmp_path / "one.jsonl", QUESTIONS[:1]),
    }
    for source in cases.values():
        with pytest.raises(Edge0Error, match=r"text\.prompts: .*" + Path(source).name) as error:
            load_prompts(source, train=10, held_out=10, seed=0)
        assert "\n" not in str(error.value)
    with pytest.raises(Edge0Error, match="no messages"):
        load_prompts(cases["text"], train=10, held_out=10, seed=0)


def length(prompt: Prompt) -> int:
    return len(prompt.messages[0]["content"])


def test_what_is_too_long_makes_room_for_a_later_prompt(tmp_path):
    """As many prompts as asked for, as long as the source has them; the refused ones are counted, the unread ones are not."""
    long = [{"messages": user(f"Question {n}, which is much too long for this?")} for n in range(100)]
    source = jsonl(tmp_path / "q.jsonl", [row for pair in zip(long, QUESTIONS, strict=False) for row in pair])
    limit = Limit(20, length)
    prompts = load_prompts(source, train=60, held_out=5, seed=0, limit=limit)
    assert (len(prompts.train), len(prompts.held_out)) == (60, 5)
    assert all(length(p) < 20 for p in [*prompts.train, *prompts.held_out])
    assert 40 < prompts.dropped.pop("prompt not below text.max_length=20") < 100 and not prompts.dropped
    free = load_prompts(source, train=60, held_out=5, seed=0)
    assert (len(free.train), len(free.held_out)) == (60, 5) and any(length(p) >= 20 for p in free.train)
    with pytest.raises(
        Edge0Error, match=r"text\.max_length: no train prompt is shorter than 5 tokens \(\d+ .*raise it"
    ):
        load_prompts(source, train=60, held_out=5, seed=0, limit=Limit(5, length))


def test_tasks_that_are_too_long_are_replaced_too():
    every = load_prompts("tasks", train=400, held_out=40, seed=0)
    limit = Limit(sorted(length(p) for p in every.train)[200], length)  # about half of them fit
    prompts = load_prompts("tasks", train=400, held_out=40, seed=0, limit=limit)
    assert (len(prompts.train), len(prompts.held_out)) == (400, 40)
    assert prompts.dropped[limit.reason] > 200 and all(length(p) < limit.tokens for p in prompts.train)
    fitting = [p for p in every.train if length(p) < limit.tokens]
    assert prompts.train[: len(fitting)] == fitting  # in the order of the source
    assert load_prompts("tasks", train=400, held_out=40, seed=0, limit=Limit(10**6, length)) == every
    with pytest.raises(Edge0Error, match=r"text\.max_length: no train prompt"):
        load_prompts("tasks", train=20, held_out=5, seed=0, limit=Limit(1, length))


@pytest.mark.parametrize("name", ["gone.jsonl", "gone.parquet", "no/such-dataset"])
def test_a_source_that_is_not_there_is_an_error(tmp_path, name):
    source = str(tmp_path / name) if name.startswith("gone") else name
    with pytest.raises(Edge0Error, match=r"text\.prompts: .*(gone|such)"):
        load_prompts(source, train=1, held_out=1, seed=0)


def test_a_damaged_file_is_an_error_that_names_it(tmp_path):
    cut = tmp_path / "cut.parquet"
    Dataset.from_list(QUESTIONS).to_parquet(str(cut))
    cut.write_bytes(cut.read_bytes()[:-200])
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in QUESTIONS))[:-200])
    array = tmp_path / "array.json"
    array.write_text(json.dumps(QUESTIONS)[:-2])
    for path in (cut, packed, array):
        with pytest.raises(Edge0Error, match=path.name):
            load_prompts(str(path), train=1000, held_out=1000, seed=0)
