"""A record of how an adapter was made."""

from __future__ import annotations

import dataclasses
import json

import pytest

from edge0_runtime.contract import (
    DataSource,
    Edge0Error,
    Provenance,
)


def test_a_wrong_record_cannot_even_be_made(provenance):
    phase = provenance().phases[0]
    for call in (
        lambda: provenance(commit=""),
        lambda: provenance(template_hash="x"),
        lambda: provenance(phases=[phase]),
        lambda: provenance(teacher={"id": "x", "revision": "y"}),
        lambda: dataclasses.replace(phase, metrics={"loss": float("nan")}),
        lambda: dataclasses.replace(phase, metrics={1: 0.5}),
        lambda: dataclasses.replace(phase, seed=True),
        lambda: dataclasses.replace(phase, parents={"base": "x"}),
        lambda: dataclasses.replace(phase, time="now"),
        lambda: DataSource("", 1),
        lambda: Provenance.from_dict(provenance().to_dict() | {"more": 1}),
        lambda: Provenance.from_dict({"commit": "x"}),
        lambda: Provenance.from_dict([]),
    ):
        with pytest.raises(Edge0Error, match=r"provenance"):
            call()


def test_a_record_survives_json(provenance):
    record = provenance(template_hash=None, data=DataSource("f", 3))
    assert Provenance.from_dict(json.loads(json.dumps(record.to_dict()))) == record
