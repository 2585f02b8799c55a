"""Forms of data that people have: read, or refused with what was found and the setting that helps."""

from __future__ import annotations

import gzip
import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.data.prompts import Prompts, load_prompts

ROWS = [{"messages": [{"role": "user", "content": f"Question {n}?"}], "answer": str(n)} for n in range(120)]


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def load(source: Path | str, **settings: Any) -> Prompts:
    return load_prompts(str(source), train=1000, held_out=1000, seed=0, **settings)


def answers(prompts: Prompts) -> list[int]:
    return sorted(int(p.answer) for p in (*prompts.train, *prompts.held_out))


def write_forms(folder: Path) -> dict[str, Path | str]:
    (folder / "lines.jsonl").write_text(lines(ROWS))
    (folder / "lines.jsonl.gz").write_bytes(gzip.compress(lines(ROWS).encode()))
    (folder / "array.json").write_text(json.dumps(ROWS, indent=1))
    (folder / "lines.json").write_text(lines(ROWS))
    data = Dataset.from_list(ROWS)
    data.to_parquet(str(folder / "one[1].parquet"))
    data.save_to_disk(str(folder / "saved"))
    DatasetDict({"train": data, "test": data.select(range(5))}).save_to_disk(str(folder / "saved_splits"))
    for name, part in (("a", ROWS[:70]), ("b", ROWS[70:])):
        (folder / "shards" / name).mkdir(parents=True)
        (folder / "shards" / name / "rows.jsonl").write_text(lines(part))
        (folder / "shards" / "README.md").write_text("Rows.")
    (folder / "splits").mkdir()
    data.select(range(60)).to_parquet(str(folder / "splits" / "train-00000-of-00002.parquet"))
    data.select(range(60, 120)).to_parquet(str(folder / "splits" / "train-00001-of-00002.parquet"))
    data.select(range(3)).to_parquet(str(folder / "splits" / "test-00000-of-00001.parquet"))
    names = ("lines.jsonl", "lines.jsonl.gz", "array.json", "lines.json", "one[1].parquet", "saved", "saved_splits")
    globs = {"glob": str(folder / "shards" / "*" / "*.jsonl"), "deep": str(folder / "shards" / "**" / "*.jsonl")}
    return {name: folder / name for name in (*names, "shards", "splits")} | globs


def test_every_form_of_the_same_rows_gives_the_same_prompts(tmp_path):
    want = None
    for name, source in write_forms(tmp_path).items():
        prompts = load(source)
        assert answers(prompts) == list(range(120)), name
        want = want or prompts
        assert prompts == want, name


def test_the_split_is_chosen_by_its_setting_and_a_wrong_one_named(tmp_path):
    forms = write_forms(tmp_path)
    for name, count in (("saved_splits", 5), ("splits", 3)):
        with pytest.raises(
            Edge0Error, match=rf"text\.split: .*{name} has no split 'val' but train, test; .*text\.split=train"
        ):
            load(forms[name], split="val")
        with pytest.raises(Edge0Error, match=rf"gave {count} train and 0 held-out"):
            load(forms[name], split="test")
    DatasetDict({"test": Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "only_test"))
    with pytest.raises(Edge0Error, match=r"no split 'train' but test; choose one, e\.g\. text\.split=test"):
        load(tmp_path / "only_test")
    assert answers(load(tmp_path / "only_test", split="test")) == list(range(120))


@pytest.mark.parametrize(
    "row",
    [
        lambda text: {"prompt": text},
        lambda text: {"prompt": [{"role": "user", "content": text}]},
        lambda text: {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "Yes."}]},
        lambda text: {"conversations": [{"role": "user", "content": text}]},
        lambda text: {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]},
        lambda text: {
            "messages": [{"role": "user", "content": [{"type": "text", "text": p} for p in text.split("|")]}]
        },
        lambda text: {"messages": None, "prompt": text},
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_every_shape_of_a_row_gives_the_same_conversation(tmp_path, row, kind):
    file = tmp_path / f"rows.{kind}"
    rows = [row(f"Question |{n}?") | {"answer": n} for n in range(120)]
    Dataset.from_list(rows).to_parquet(str(file)) if kind == "parquet" else file.write_text(lines(rows))
    prompts = load(file)
    for prompt in (*prompts.train, *prompts.held_out):
        text = prompt.messages[0]["content"].replace("|", "")
        assert (len(prompt.messages), prompt.messages[0]["role"], text) == (1, "user", f"Question {prompt.answer}?")
    assert answers(prompts) == list(range(120)) and not prompts.dropped


def test_sharegpt_roles_and_a_system_column_become_turns(tmp_path):
    said = [("system", "S"), ("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d")]
    rows = [{"conversations": [{"from": who, "value": f"{what}{n}"} for who, what in said]} for n in range(60)]
    (tmp_path / "a.jsonl").write_text(lines(rows))
    rows = [{"system": f"S{n}", "conversations": row["conversations"][1:]} for n, row in enumerate(rows)]
    (tmp_path / "b.jsonl").write_text(lines(rows))
    one, other = load(tmp_path / "a.jsonl"), load(tmp_path / "b.jsonl")
    assert one == other and not one.dropped
    assert [m["role"] for m in one.train[0].messages] == ["system", "user", "assistant", "user"]
    assert one.train[0].messages[-1]["content"].startswith("c")


def test_a_column_is_chosen_by_its_setting_and_what_is_there_is_said(tmp_path):
    alpaca = [{"instruction": f"Do {n}.", "input": "", "output": "Done."} for n in range(120)]
    file = tmp_path / "alpaca.jsonl"
    file.write_text(lines(alpaca))
    with pytest.raises(Edge0Error, match="has the columns instruction, input, output, but no messages") as error:
        load(file)
    advised = str(error.value).rpartition("text.column=")[2]
    assert advised == "instruction" and len(load(file, column=advised).train) > 90
    with pytest.raises(Edge0Error, match=r"text\.column: .* has the columns .*, but no question"):
        load(file, column="question")


@pytest.mark.parametrize("name", ["rows.csv", "rows.txt", "rows.jsonl.zst", "rows.arrow"])
def test_a_form_that_is_not_read_is_refused_with_those_that_are(tmp_path, name):
    (tmp_path / name).write_text("messages\nhello\n")
    with pytest.raises(Edge0Error, match=rf"{name}: {Path(name).suffix} files are not read; .*(jsonl|JSON lines)"):
        load(tmp_path / name)


@pytest.mark.parametrize("kind", ["csv", "arrow"])
def test_the_advised_command_makes_a_file_that_is_read(tmp_path, kind):
    file, prompts = tmp_path / f"rows.{kind}", [f"Question {n}?" for n in range(120)]
    if kind == "csv":
        file.write_text("\n".join(["prompt", *prompts]))
    else:
        Dataset.from_dict({"prompt": prompts}).save_to_disk(str(tmp_path / "saved"))
        (tmp_path / "saved" / "data-00000-of-00001.arrow").rename(file)
    with pytest.raises(Edge0Error, match="files are not read") as error:
        load(file)
    _, _, command = str(error.value).partition("write it as JSON lines: ")
    exec(shlex.split(command)[2])  # what `python -c` would run
    found = load(file.with_suffix(".jsonl"))
    assert {p.messages[0]["content"] for p in (*found.train, *found.held_out)} == set(prompts)


def test_what_is_not_there_is_said(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "cat.png").write_bytes(b"")
    for source in ("empty", "pictures", "*.jsonl", "none/*.parquet"):
        with pytest.raises(
            Edge0Error, match=r"text\.prompts: .* holds no file that is read; give a file, folder or glob"
        ):
            load(tmp_path / source)
    for source in ("gone.jsonl", "gone.csv", "gone.jsonl.gz"):
        with pytest.raises(Edge0Error, match=r"text\.prompts: .*gone\..* does not exist"):
            load(tmp_path / source)


@pytest.mark.parametrize("name", ["pipe.jsonl", "pipe.jsonl.gz", "pipe.json", "pipe.parquet"])
def test_a_pipe_is_no_file_of_rows(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(Edge0Error, match=rf"{name}: not a regular file"):
        load(tmp_path / name)


def test_places_say_which_shard(tmp_path):
    for name, part in (("a", ROWS[:60]), ("b", ROWS[60:])):
        (tmp_path / f"{name}.jsonl").write_text(lines([*part, {"messages": 3}]))
    Dataset.from_list([*ROWS, {"messages": []}]).to_parquet(str(tmp_path / "c.parquet"))
    assert load(tmp_path / "*.jsonl").places == {"no messages": ["a.jsonl line 61", "b.jsonl line 61"]}
    assert load(tmp_path / "c.parquet").places == {"no messages": ["row 121"]}


@pytest.mark.parametrize("damage", ["a pipe", "2 GiB"])
def test_a_saved_dataset_is_looked_at_before_the_library_opens_it(tmp_path, damage):
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    name = "data-00000-of-00001.arrow" if damage == "a pipe" else "dataset_info.json"
    (tmp_path / "saved" / name).unlink()
    if damage == "a pipe":
        os.mkfifo(tmp_path / "saved" / name)
    else:
        (tmp_path / "saved" / name).touch()
        os.truncate(tmp_path / "saved" / name, 2 << 30)
    with pytest.raises(Edge0Error, match=f"{name}: (not a regular file|has 2,147,483,648 bytes, more than)"):
        load(tmp_path / "saved")
