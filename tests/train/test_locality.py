"""Misses of a least-recently-used store, against one written as a plain list."""

from __future__ import annotations

import pytest
import torch

from edge0_train.locality import Locality, Store


def plain_misses(sets: list[list[int]], counted: list[bool], held: int) -> int:
    """Newest last, experts of one input in their order."""
    kept: list[int] = []
    missed = 0
    for experts, counts in zip(sets, counted, strict=True):
        missed += counts * len([e for e in experts if e not in kept])
        kept = [e for e in kept if e not in experts] + experts
        kept = kept[max(0, len(kept) - held) :]
    return missed


@pytest.mark.parametrize("held", [4, 6, 8, 16])
def test_misses_are_those_of_a_plain_list_over_several_sequences(held: int) -> None:
    generator = torch.Generator().manual_seed(held)
    executed = {
        layer: torch.stack([torch.randperm(16, generator=generator)[:4] for _ in range(3 * 20)]).view(3, 20, 4)
        for layer in (2, 5)
    }
    predicted_BT = torch.rand(3, 20, generator=generator) < 0.7
    lengths = (20, 13, 1)
    locality = Locality((2, 5), (held,))
    for row, length in enumerate(lengths):
        locality.add(executed, row, predicted_BT[row], length)
    counted = [flag for row, length in enumerate(lengths) for flag in predicted_BT[row, :length].tolist()]
    want = sum(
        plain_misses([e for r, n in enumerate(lengths) for e in executed[layer][r, :n].tolist()], counted, held)
        for layer in executed
    )
    assert locality.inputs == 2 * sum(counted) > 0
    assert locality.misses() == {held: want / (2 * sum(counted))}
    assert locality.used() == 4


def test_an_expert_named_twice_is_read_once() -> None:
    store = Store(4)
    assert store.use([1, 2, 2, 1]) == 2 and store.use([2, 3]) == 1 and store.use([1]) == 0


def test_nothing_counted_is_no_division_by_zero() -> None:
    assert Locality((1,), (4,)).misses() == {4: 0.0}
