"""Rows and batches: files say when they were changed, and every token lies where a plain loop would put it."""

from __future__ import annotations

import json
import os
from collections import Counter

import numpy as np
import pytest
import torch

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.data.rows import (
    IGNORE,
    TextRow,
    collate,
    micro_batches,
    read_data,
    read_rows,
    shuffled,
    write_data,
    write_rows,
)

# -- rows --------------------------------------------------------------------------------------------------------------


def row(prompt: int, completion: int, reason: str = "stop") -> TextRow:
    start = 10 * prompt + completion
    return TextRow(
        tuple(range(start, start + prompt)), tuple(range(500, 500 + completion)), reason, "add", "Zoë #7\n\u2028"
    )


def test_rows_round_trip(tmp_path):
    rows = [row(2, 3), row(1, 1, "length"), row(5, 8)]
    write_rows(tmp_path / "rows.jsonl", rows)
    assert read_rows(tmp_path / "rows.jsonl") == rows


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt_ids": [1], "completion_ids": [2]',
        '{"prompt_ids": [1]}',
        '{"prompt_ids": [1], "completion_ids": [2], "finish_reason": "stop", "extra": 1}',
        '{"prompt_ids": 1, "completion_ids": [2], "finish_reason": "stop"}',
        "[1, 2]",
        "3",
        '{"prompt_ids": ["1"], "completion_ids": [2], "finish_reason": "stop"}',
        '{"prompt_ids": [true], "completion_ids": [2], "finish_reason": "stop"}',
        '{"prompt_ids": [1.0], "completion_ids": [2], "finish_reason": "stop"}',
        '{"prompt_ids": [1], "completion_ids": [-2], "finish_reason": "stop"}',
        '{"prompt_ids": [1], "completion_ids": [384], "finish_reason": "stop"}',
        '{"prompt_ids": [1], "completion_ids": [2], "finish_reason": "aborted"}',
        '{"prompt_ids": [1], "completion_ids": [2], "finish_reason": "stop", "answer": 3}',
        '{"prompt_ids": [1], "prompt_ids": [2], "completion_ids": [2], "finish_reason": "stop"}',
        '{"prompt_ids": [1], "completion_ids": [NaN], "finish_reason": "stop"}',
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path, line):
    write_rows(tmp_path / "rows.jsonl", [TextRow((1, 383), (2,), "stop")])
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(Edge0Error, match=r"rows\.jsonl, line 2: .*continue it with resume=true") as error:
        read_rows(tmp_path / "rows.jsonl", 384)
    assert "\n" not in str(error.value)


def test_an_endless_or_enormous_file_of_rows_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(Edge0Error, match=r"rows\.jsonl"):
        read_rows(tmp_path / "rows.jsonl")
    with (tmp_path / "long.jsonl").open("wb") as file:
        file.truncate(2**33)  # no line ending in 8 GiB
        with pytest.raises(Edge0Error, match=r"long\.jsonl, line 1: longer than"):
            read_rows(tmp_path / "long.jsonl")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fingerprint", None),
        ("fingerprint", 3),
        ("tokenizer_sha256", ["0" * 64]),
        ("template_sha256", "0"),
        ("teacher", "nano-teacher"),
        ("teacher", {"id": "", "revision": "x"}),
        ("teacher", {"id": "t"}),
    ],
)
def test_a_damaged_card_is_named(tmp_path, field, value):
    card = write_data(tmp_path, [row(2, 3)], [row(4, 4)], {})
    (tmp_path / "card.json").write_text(json.dumps(card | {field: value}))
    with pytest.raises(Edge0Error, match=rf"card\.json: damaged:\n  - {field}: "):
        read_data(tmp_path, 64)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\udcff", '{"fingerprint": NaN}', "{}"])
def test_a_card_that_is_no_card_is_named(tmp_path, text):
    write_data(tmp_path, [row(2, 3)], [row(4, 4)], {})
    (tmp_path / "card.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(Edge0Error, match=r"card\.json: .*continue it with resume=true|card\.json: damaged"):
        read_data(tmp_path, 64)


def test_data_round_trip_with_card(tmp_path):
    train, held_out = [row(n, n + 1) for n in range(1, 6)], [row(3, 3, "length"), row(2, 2)]
    card = write_data(tmp_path, train, held_out, {"dropped_prompts": {"duplicate prompt": 2}})
    data, dropped = read_data(tmp_path, 64)
    assert (data.train, data.held_out, data.card, dropped) == (train, held_out, card, {})
    assert (
        card["train"]["rows"] == 5 and card["train"]["prompt_tokens"] == 15 and card["train"]["completion_tokens"] == 20
    )
    assert card["train"]["completion_length"] == {"mean": 4.0, "max": 6}
    assert card["held_out"]["finish_reasons"] == {"length": 1, "stop": 1}
    assert card["dropped_prompts"] == {"duplicate prompt": 2}


@pytest.mark.parametrize("name", ["train.jsonl", "held_out.jsonl"])
def test_rows_changed_after_the_card_are_refused(tmp_path, name):
    write_data(tmp_path, [row(2, 3), row(3, 3)], [row(4, 4), row(5, 5)], {})
    lines = (tmp_path / name).read_text().splitlines(keepends=True)
    for changed in ("".join(lines[:1]), "".join(lines[::-1]), "".join(lines).replace("500", "501", 1)):
        (tmp_path / name).write_text(changed)
        with pytest.raises(Edge0Error, match="changed after its card"):
            read_data(tmp_path, 64)


def test_rows_moved_between_the_sides_are_refused(tmp_path):
    """The fingerprint covers where a row lies, not only what it says."""
    write_data(tmp_path, [row(2, 3), row(3, 3)], [row(4, 4), row(5, 5)], {})
    lines = [(tmp_path / f"{name}.jsonl").read_text().splitlines(keepends=True) for name in ("train", "held_out")]
    (tmp_path / "train.jsonl").write_text("".join([*lines[0], lines[1][0]]))
    (tmp_path / "held_out.jsonl").write_text(lines[1][1])
    with pytest.raises(Edge0Error, match="changed after its card"):
        read_data(tmp_path, 64)


@pytest.mark.parametrize("missing", ["train.jsonl", "held_out.jsonl", "card.json"])
def test_a_missing_file_is_named(tmp_path, missing):
    write_data(tmp_path, [row(2, 3)], [row(4, 4)], {})
    (tmp_path / missing).unlink()
    with pytest.raises(Edge0Error, match=missing):
        read_data(tmp_path, 64)


def test_long_and_empty_rows_are_dropped_and_counted(tmp_path):
    train = [row(2, 3), row(20, 13), row(20, 12), row(3, 0), row(0, 3)]
    write_data(tmp_path, train, [row(4, 4), row(40, 4)], {})
    data, dropped = read_data(tmp_path, 32)
    assert data.train == [row(2, 3), row(20, 12)] and data.held_out == [row(4, 4)]
    assert dropped == {"longer than text.max_length=32": 2, "empty prompt or completion": 2}
    with pytest.raises(Edge0Error, match=r"no held_out row .*text\.max_length"):
        read_data(tmp_path, 7)
    with pytest.raises(Edge0Error, match=r"no train row"):
        read_data(tmp_path, 1)


# -- batches -----------------------------------------------------------------------------------------------------------


def test_collate_equals_a_plain_loop():
    rows = [row(1, 1), row(1, 6), row(4, 2), row(7, 1), row(3, 5)]
    batch = collate(rows, pad_id=77)
    width = max(r.length for r in rows) - 1
    assert batch.input_ids_BT.shape == batch.labels_BT.shape == batch.decoded_BT.shape == (5, width)
    valid = tokens = 0
    for i, one in enumerate(rows):
        sequence = [*one.prompt_ids, *one.completion_ids]
        for t in range(width):
            if t >= len(sequence) - 1:  # padding, and the last token, which is nobody's input
                want = (77, IGNORE, False)
            else:
                follower_generated = t + 1 >= len(one.prompt_ids)
                generated = t >= len(one.prompt_ids)
                want = (sequence[t], sequence[t + 1] if follower_generated else IGNORE, generated)
                tokens += 1
                valid += follower_generated
            assert (int(batch.input_ids_BT[i, t]), int(batch.labels_BT[i, t]), bool(batch.decoded_BT[i, t])) == want, (
                i,
                t,
            )
    assert (batch.valid, batch.tokens, batch.rows) == (valid, tokens, tuple(rows))
    assert valid == sum(len(r.completion_ids) for r in rows)
    assert batch.decoded_BT.dtype == torch.bool and batch.labels_BT.dtype == batch.input_ids_BT.dtype == torch.int64


def test_padding_that_looks_like_a_token_changes_nothing():
    rows = [row(2, 2), row(3, 6)]
    one, other = collate(rows, pad_id=0), collate(rows, pad_id=500)
    assert torch.equal(one.labels_BT, other.labels_BT) and one.valid == other.valid


@pytest.mark.parametrize(("count", "per_step"), [(10, 3), (7, 7), (5, 8), (1, 1), (3, 10), (64, 16)])
def test_shuffled_is_a_function_of_the_step_and_covers_every_epoch(count, per_step):
    order = shuffled(count, per_step, seed=4)
    epochs = 6
    steps = [order(step) for step in range(-(-count * epochs // per_step))]
    assert all(len(indices) == per_step for indices in steps)
    drawn = np.concatenate(steps)[: count * epochs].reshape(epochs, count)
    assert all(sorted(epoch) == list(range(count)) for epoch in drawn.tolist())
    fresh = shuffled(count, per_step, seed=4)
    for step in reversed(range(len(steps))):  # any order, any process
        assert np.array_equal(fresh(step), steps[step])
    if count > 5:
        assert any(not np.array_equal(drawn[0], epoch) for epoch in drawn[1:])
        assert any(not np.array_equal(shuffled(count, per_step, seed=5)(s), steps[s]) for s in range(len(steps)))


def test_micro_batches_hold_the_windows_rows_in_order():
    rows = [row(n, n) for n in range(1, 8)]
    indices = np.array([3, 0, 6, 2, 5])
    for size in (1, 2, 5, 9):
        batches = micro_batches(rows, indices, size, 0, "cpu")
        assert [len(b.rows) for b in batches] == [min(size, 5 - i) for i in range(0, 5, size)]
        assert [r for b in batches for r in b.rows] == [rows[i] for i in indices]
        assert sum(b.valid for b in batches) == sum(len(rows[i].completion_ids) for i in indices)
    assert Counter(len(b.rows) for b in micro_batches(rows, indices, 2, 0, "cpu")) == {2: 2, 1: 1}
