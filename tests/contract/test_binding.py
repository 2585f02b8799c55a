"""Which adapters may be served together, and what the public project would serve."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from edge0_runtime.contract import (
    Lora,
    Router,
    builtin_tier,
    check_binding,
    read_adapter,
    upstream_problems,
)
from tests.contract.adapters import BASE, KINDS, OTHER, refusal, without_contract

# -- binding


def test_files_made_together_bind_without_a_note(pair):
    prerouter, lora = pair
    assert check_binding(BASE, prerouter, lora) == []
    assert (
        check_binding(BASE, prerouter, None) == check_binding(BASE, None, lora) == check_binding(BASE, None, None) == []
    )


def test_another_base_is_refused_with_both_values_and_the_flag(pair):
    text = refusal(check_binding, OTHER, *pair)
    assert text.count(BASE) == text.count(OTHER) == 2  # for both files
    assert "--allow-mismatch" in text
    assert len(check_binding(OTHER, *pair, allow_mismatch=True)) == 2


@pytest.mark.parametrize("trained_with", [OTHER, None])
def test_another_prerouter_or_none_is_refused_with_both_values(pair, written, trained_with):
    prerouter, _ = pair
    lora = read_adapter(written("lora", prerouter_sha256=trained_with), "lora")
    text = refusal(check_binding, BASE, prerouter, lora)
    assert (trained_with or "no prerouter") in text
    assert prerouter.sha256 in text
    assert "--allow-mismatch" in text
    (note,) = check_binding(BASE, prerouter, lora, allow_mismatch=True)
    assert note.startswith("--allow-mismatch: ")


def test_adapters_of_two_tiers_are_refused_even_with_the_flag(pair, nano):
    prerouter, lora = pair
    other = dataclasses.replace(lora, tier=dataclasses.replace(nano, k=8))
    assert "k: 4 and 8" in refusal(check_binding, BASE, prerouter, other, allow_mismatch=True)
    other = dataclasses.replace(lora, tier=dataclasses.replace(nano, token_aware=True))
    assert "token_aware: False and True" in refusal(check_binding, BASE, prerouter, other, allow_mismatch=True)


def test_a_lora_of_another_rank_may_serve_with_the_same_heads(pair, nano):
    prerouter, lora = pair
    other = dataclasses.replace(lora, tier=dataclasses.replace(nano, lora=Lora(8, 16, nano.lora.targets)))
    assert check_binding(BASE, prerouter, other) == []


def test_files_without_a_contract_are_served_with_a_note(tmp_path, tensors, nano):
    adapters = [read_adapter(without_contract(tmp_path / k, tensors, k, {}), k, nano) for k in KINDS]
    notes = check_binding(BASE, *adapters)
    assert len(notes) == 2
    assert all("cannot be checked" in note for note in notes)


# -- upstream


def adapter_of_35b(pair, kind: str = "lora", **fields):
    tier = dataclasses.replace(builtin_tier("35b"), **fields)
    return dataclasses.replace(pair[KINDS.index(kind)], tier=tier)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tier_of_the_public_project_loads_there(pair, kind):
    assert upstream_problems(adapter_of_35b(pair, kind)) == []


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("lora", {"lora": Lora(8, 32, ())}, "r = 8 and alpha = 32; it scales by 32 / 16"),
        ("lora", {"lora": Lora(16, 16, ())}, "alpha = 16"),
        ("lora", {"k": 8}, "k is 8; it has 4"),
        (
            "lora",
            {"router": Router("softmax_topk", mass_k=16)},
            "router.mass_k is 16: weights are divided by a wider mass",
        ),
        ("prerouter", {"router": Router("softmax_topk", scaling=2.0)}, "router is Router("),
        ("prerouter", {"feature_topk": "teacher"}, "feature_topk is teacher"),
        ("prerouter", {"owners": (1, 2)}, "owners is (1, 2)"),
        ("prerouter", {"token_aware": True}, "token_aware is True"),
        ("lora", {"token_aware": True}, "token_aware is True"),
        ("prerouter", {"name": "mine"}, "tier mine is not one of its own"),
    ],
)
def test_what_the_public_runtime_cannot_serve_is_said(pair, kind, fields, reason):
    (problem,) = upstream_problems(adapter_of_35b(pair, kind, **fields))
    assert reason in problem


def test_the_loras_layout_does_not_concern_the_heads_upstream(pair):
    assert upstream_problems(adapter_of_35b(pair, "prerouter", lora=Lora(8, 8, ()))) == []


def test_other_dtypes_than_f16_are_said(pair):
    adapter = adapter_of_35b(pair)
    floats = dataclasses.replace(adapter, tensors={"x": np.ones(1, np.float32)})
    assert upstream_problems(floats) == ["tensors are float32; it serves F16 and cannot read BF16"]
