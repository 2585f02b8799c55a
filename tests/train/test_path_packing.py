"""The student path on documents packed into rows."""

from __future__ import annotations

import pytest
import torch

from edge0_train.data.rows import Batch, collate
from tests.reference_path import (
    STICKY,
    TOKEN_AWARE,
    VARIANTS,
    as_sets,
    close,
    gradients,
    make,
    probe,
    text_rows,
)

PACKED = [(1, 7), (2, 2), (1, 1), (5, 5), (2, 1), (3, 6), (1, 2)]
"""Rows shorter than the short convolution's kernel among them."""


@pytest.mark.parametrize("name", ["35b", "executed-predicted", "8b", "ling", *TOKEN_AWARE, *STICKY])
def test_packed_rows_equal_decoding_each_alone(adapted, name):
    """Nothing crosses a document's boundary: attention, delta rule, short convolution, prerouter shift, one-hots."""
    path, reference = make(adapted, VARIANTS[name])
    rows = text_rows(PACKED)
    batch = collate(rows, pad_id=0, pack_length=16)
    assert 1 < len(batch.input_ids_BT) < len(rows)
    with torch.no_grad():
        routing = path.predicted(batch.decoded_BT, batch.start_BT)
        hidden_BTH = path.hidden(batch.input_ids_BT, routing, use_cache=False).last_hidden_state
    for row, (line, at) in zip(batch.rows, places(batch), strict=True):
        ids = [*row.prompt_ids, *row.completion_ids][:-1]
        assert batch.input_ids_BT[line, at : at + len(ids)].tolist() == ids
        with torch.no_grad():
            want_TH, want_sets = reference.run(ids, [t >= len(row.prompt_ids) for t in range(len(ids))])
        assert [as_sets(routing.executed, line, at + t) for t in range(len(ids))] == want_sets
        close(hidden_BTH[line, at : at + len(ids)], want_TH, 3e-5)


@pytest.mark.parametrize("name", ["35b", "ling"])
def test_packed_gradients_equal_the_sum_of_the_rows_own(adapted, name):
    path, _ = make(adapted, VARIANTS[name])
    rows = text_rows(PACKED)
    sums = []
    for pack_length in (0, 16):
        batch = collate(rows, pad_id=0, pack_length=pack_length)
        routing = path.predicted(batch.decoded_BT, batch.start_BT)
        hidden_BTH = path.hidden(batch.input_ids_BT, routing, use_cache=False).last_hidden_state
        spots = dict(zip(batch.rows, places(batch), strict=True))
        parts = [hidden_BTH[line, at : at + row.length - 1] for row, (line, at) in ((row, spots[row]) for row in rows)]
        probe(torch.cat(parts)).backward()
        sums.append(gradients(path.model))
    for key in sums[0]:
        close(sums[1][key], sums[0][key], 1e-4)


def places(batch: Batch) -> list[tuple[int, int]]:
    """(line, first input) of every row, in the batch's order; a start with other ids than the next row's is padding."""
    found: list[tuple[int, int]] = []
    for line, at in batch.start_BT.nonzero().tolist():
        row = batch.rows[min(len(found), len(batch.rows) - 1)]
        ids = [*row.prompt_ids, *row.completion_ids][:-1]
        if len(found) < len(batch.rows) and batch.input_ids_BT[line, at : at + len(ids)].tolist() == ids:
            found.append((line, at))
    return found
