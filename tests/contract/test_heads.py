"""Heads as data: inputs, columns, tensors, and what follows from them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from edge0_runtime.contract.artifacts import Adapter
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.heads import HEAD_INPUTS, HEAD_KINDS, HeadKind
from edge0_runtime.contract.public_runtime import upstream_problems
from edge0_runtime.contract.tier import Tier, builtin_tier, read_tier


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch) -> str:
    """Another kind of head, declared for one test: one matrix over the hidden state."""
    kind = HeadKind(("hidden",), lambda inputs, width, experts: {"map": (experts, inputs)}, direct="map", adding=())
    monkeypatch.setitem(HEAD_KINDS, "linear", kind)
    return "linear"


def test_inputs_lie_side_by_side_in_their_order(nano: Tier) -> None:
    assert nano.head_inputs == ("hidden", "routing", "previous")
    assert nano.head_columns == {"hidden": slice(0, 64), "routing": slice(64, 96), "previous": slice(96, 128)}
    aware = dataclasses.replace(nano, token_aware=True)
    assert aware.head_columns == nano.head_columns | {"token": slice(128, 192)} and aware.head_input == 192


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_a_kind_names_its_parts_and_inputs(kind: str) -> None:
    one = HEAD_KINDS[kind]
    parts = one.tensors(10, 6, 4)
    assert parts[one.direct] == (4, 10) and {parts[name][0] for name in one.adding} <= {4}
    assert {HEAD_INPUTS[name].of for name in one.inputs} == {"before"}, "what is of the token itself comes last"
    assert "hidden" in one.inputs, "a warm start puts the next layer's router there"


def test_a_kind_of_ones_own_has_its_own_tensors(nano: Tier, linear: str) -> None:
    tier = Tier.from_dict(nano.to_dict() | {"head": linear})
    assert tier.head_inputs == ("hidden",) and tier.head_input == 64
    assert tier.head_tensors() == {f"layers.{n}.map.weight": (32, 64) for n in nano.owners}
    assert Tier.from_dict(tier.to_dict()) == tier
    assert dataclasses.replace(tier, token_aware=True).head_input == 128


def test_a_kind_of_ones_own_is_not_served_upstream(linear: str) -> None:
    tier = dataclasses.replace(builtin_tier("35b"), head=linear)
    (problem,) = upstream_problems(
        Adapter("prerouter", Path("prerouter_edge0_35b.safetensors"), tier, {}, None, "", True)
    )
    assert problem == "head is linear; it has heads of kind mlp alone"


def test_an_unknown_kind_is_refused(nano: Tier) -> None:
    with pytest.raises(Edge0Error, match=r"tier\.head: 'tree' is unknown; choose one of mlp"):
        Tier.from_dict(nano.to_dict() | {"head": "tree"})


def test_a_tier_from_before_kinds_of_heads_has_the_paper_s(nano: Tier) -> None:
    data = nano.to_dict()
    assert data.pop("head") == "mlp"
    assert Tier.from_dict(data) == nano


def test_the_settings_in_a_tier_s_file_are_not_the_tier_s(tmp_path, nano: Tier) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(nano.to_dict() | {"settings": {"optim": {"lr": 1}}}))
    assert read_tier(str(file)) == nano == builtin_tier("nano")
    with pytest.raises(Edge0Error, match="unknown: settings"):
        Tier.from_dict(nano.to_dict() | {"settings": {}})
