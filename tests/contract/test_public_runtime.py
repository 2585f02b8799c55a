"""What the public project's runtime would do with a base and its adapters, for the reasons that hold there."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from edge0_runtime.contract import Lora, Router, Tier, builtin_tier, upstream_base_problems, upstream_problems
from edge0_runtime.contract.artifacts import Adapter
from edge0_runtime.contract.checkpoint import Checkpoint
from tests.contract.adapters import KINDS

EVERY = pytest.mark.parametrize("kind", KINDS)


def adapter_of(of: str, kind: str = "prerouter", file: str = "", **fields) -> Adapter:
    """A file of a tier with other fields, under the name that the public runtime opens."""
    tier = dataclasses.replace(builtin_tier(of), **fields)
    path = Path(file or builtin_tier(of).file_name(kind))
    return Adapter(kind, path, tier, {"x": np.ones(1, np.float16)}, None, "", True)


@EVERY
@pytest.mark.parametrize("name", ["35b", "8b"])
def test_a_tier_of_the_public_project_loads_there(kind, name):
    assert upstream_problems(adapter_of(name, kind)) == []


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
        ("prerouter", {"router": Router("softmax_topk", scaling=2.0)}, "router.scaling is 2.0; it has 1.0"),
        ("prerouter", {"feature_topk": "teacher"}, "feature_topk is teacher"),
        ("prerouter", {"first_token": "predicted"}, "first_token is predicted; it has gate"),
        ("prerouter", {"owners": tuple(range(6, 38))}, "layers without a head: 38; it stops where one is missing"),
        ("prerouter", {"consumers": tuple(range(8, 39))}, "predicted layers are 8..38; it predicts 7..38"),
        ("prerouter", {"consumers": tuple(range(7, 40))}, "layer 39 is predicted; it never predicts the last layer"),
        ("prerouter", {"token_aware": True}, "token_aware is True"),
        ("lora", {"token_aware": True}, "token_aware is True"),
        ("prerouter", {"file": "prerouter_edge0_mine.safetensors"}, "it opens prerouter_edge0_35b.safetensors and no other"),
        ("lora", {"file": "lora_edge0_mine.safetensors"}, "it opens lora_edge0_35b.safetensors and no other"),
    ],
)  # fmt: skip
def test_what_the_public_runtime_cannot_serve_is_said(kind, fields, reason):
    (problem,) = upstream_problems(adapter_of("35b", kind, **fields))
    assert reason in problem


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("prerouter", {"lora": Lora(8, 8, ())}),  # the LoRA's layout does not concern the heads
        ("lora", {"lora": Lora(8, 16.0, ("self_attn.q_proj",))}),  # the factor alone is compiled in
        ("prerouter", {"name": "mine", "model": "another", "head_width": 64}),
        ("prerouter", {"owners": tuple(range(3, 39))}),  # heads that it has no use for are left out
    ],
)
def test_what_makes_no_difference_there_is_no_reason(kind, fields):
    assert upstream_problems(adapter_of("35b", kind, **fields)) == []


def with_numbers(tier: Tier, **numbers: int) -> Tier:
    return dataclasses.replace(tier, architecture=dict(tier.architecture) | numbers)


def test_the_softmax_engine_takes_depth_and_widths_from_the_config_but_not_the_number_of_experts():
    smaller = with_numbers(builtin_tier("35b"), num_hidden_layers=12, hidden_size=64, moe_intermediate_size=64)
    fields = {"architecture": smaller.architecture, "owners": tuple(range(6, 11)), "consumers": tuple(range(7, 11))}
    assert upstream_problems(adapter_of("35b", **fields)) == []
    fields["architecture"] = with_numbers(smaller, num_experts=32).architecture
    assert upstream_problems(adapter_of("35b", **fields)) == ["num_experts is 32; it has 256"]


def test_the_last_layer_is_no_reason_for_a_nano_that_leaves_it_alone():
    nano = builtin_tier("nano")
    to_the_end = dataclasses.replace(nano, owners=tuple(range(1, 7)), consumers=tuple(range(2, 8)))
    like_35b = dataclasses.replace(to_the_end, consumers=tuple(range(2, 7)))
    reasons = []
    for tier in (to_the_end, like_35b):
        heads = Adapter("prerouter", Path("prerouter_edge0_nano.safetensors"), tier, {}, None, "", True)
        reasons.append(upstream_problems(heads))
    assert [reason for reason in reasons[0] if reason not in reasons[1]] == [
        "layer 7 is predicted; it never predicts the last layer"
    ]
    assert reasons[1] == [
        "the file is prerouter_edge0_nano.safetensors; it opens prerouter_edge0_35b.safetensors and no other",
        "num_experts is 32; it has 256",
        "predicted layers are 2..6; it predicts none",
    ]


def test_the_other_engine_predicts_the_last_layer_and_the_same_ones_at_any_depth():
    assert 23 in builtin_tier("8b").consumers
    deeper = with_numbers(builtin_tier("8b"), num_hidden_layers=28)
    assert upstream_problems(adapter_of("8b", architecture=deeper.architecture)) == []
    twin = builtin_tier("nano-ling")
    fields = {name: getattr(twin, name) for name in ("architecture", "owners", "consumers")}
    assert upstream_problems(adapter_of("8b", **fields)) == [
        "num_experts is 32; it has 128",
        "predicted layers are 2..7; it predicts 8..23",
        "layers without a head: 7..22; it stops where one is missing",
    ]


def test_other_dtypes_than_f16_are_said():
    floats = dataclasses.replace(adapter_of("35b"), tensors={"x": np.ones(1, np.float32)})
    assert upstream_problems(floats) == ["tensors are float32; it serves F16 and cannot read BF16"]


def test_a_family_without_an_engine_is_said():
    tier = dataclasses.replace(builtin_tier("nano"), family="qwen3_next")
    reason = "family is qwen3_next; it has engines for qwen3_5_moe and bailing_moe_v3 alone"
    assert upstream_problems(Adapter("prerouter", Path("x"), tier, {}, None, "", True)) == [reason]
    assert upstream_base_problems(Checkpoint(Path("m"), {}, {}), tier) == [reason]
