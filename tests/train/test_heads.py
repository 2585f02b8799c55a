"""Heads by kind: a kind that is declared and has a module is trained like the paper's."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from edge0_runtime.contract.heads import HEAD_KINDS, TOKEN_NORM_EPS, HeadKind
from edge0_runtime.contract.tier import Tier
from edge0_train.student import heads as kinds
from edge0_train.student.heads import PrerouterHeads, inputs_before, inputs_of_token
from edge0_train.student.path import StudentPath
from edge0_train.synthetic import overlapping_heads
from tests.tiny_models import random_qwen3_5_moe, tiny_tier


class Gated(kinds.Head):
    """logits = map(x) + out(sigmoid(inner(x))), over the routing and the hidden state, in this order."""

    def __init__(self, inputs: int, width: int, experts: int):
        super().__init__()
        self.inner = nn.Linear(inputs, width, bias=False)
        self.out = nn.Linear(width, experts, bias=False)
        self.map = nn.Linear(inputs, experts, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.map(x) + self.out(self.inner(x).sigmoid())

    def start_from(self, router_EH: torch.Tensor, hidden: slice) -> None:
        self.map.weight.zero_()
        self.map.weight[:, hidden] = router_EH
        self.out.weight.zero_()


@pytest.fixture(params=[False, True], ids=["", "token-aware"])
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tier:
    kind = HeadKind(
        inputs=("previous", "hidden", "routing"),
        tensors=lambda inputs, width, experts: {
            "inner": (width, inputs),
            "out": (experts, width),
            "map": (experts, inputs),
        },
        direct="map",
        adding=("out",),
    )
    monkeypatch.setitem(HEAD_KINDS, "gated", kind)
    monkeypatch.setitem(kinds.HEADS, "gated", Gated)
    return Tier.from_dict(tiny_tier().to_dict() | {"head": "gated", "token_aware": request.param})


def test_every_declared_kind_has_its_tensors_as_parameters_in_the_declared_order() -> None:
    assert kinds.HEADS.keys() == HEAD_KINDS.keys()
    for kind, declared in HEAD_KINDS.items():
        module = kinds.HEADS[kind](10, 6, 4)
        found = {name.removesuffix(".weight"): tuple(value.shape) for name, value in module.named_parameters()}
        assert list(found.items()) == list(declared.tensors(10, 6, 4).items())


def test_a_kind_of_ones_own_is_warm_started_routes_and_learns(tier: Tier) -> None:
    path = StudentPath(random_qwen3_5_moe(tier, seed=0), tier, heads := PrerouterHeads(tier))
    assert {key: value.shape for key, value in heads.tensors().items()} == tier.head_tensors()
    heads.warm_start(lambda layer: path.router(layer).weight)
    x = torch.randn(5, tier.head_input, generator=torch.Generator().manual_seed(0))
    for owner in tier.owners:
        want = x[:, tier.head_columns["hidden"]] @ path.router(owner + 1).weight.T
        torch.testing.assert_close(heads(owner, x), want)
    routing = path.predicted(torch.ones(1, 6, dtype=torch.bool), capture=True)
    path.hidden(torch.arange(1, 7)[None], routing, use_cache=False)
    assert all(routing.features[owner].shape == (1, 6, tier.head_input) for owner in tier.owners)
    sum(logits.square().sum() for logits in routing.predictions.values()).backward()
    assert all(parameter.grad is not None for parameter in heads.parameters())
    heads.load(overlapping_heads(tier, 1.0, 0))


def test_inputs_are_made_in_the_tier_s_order(tier: Tier) -> None:
    known = {
        name: torch.full((1, 2, width), value, dtype=torch.bfloat16)
        for name, width, value in (("hidden", 64, 1.0), ("routing", 8, 2.0), ("previous", 8, 3.0))
    }
    made = inputs_before(tier, known)
    assert made.dtype == torch.float32 and made[0, 0].unique_consecutive().tolist() == [3.0, 1.0, 2.0]
    embed, ids = nn.Embedding(9, 64), torch.tensor([[3, 7]])
    token = inputs_of_token(tier, embed, ids)
    if not tier.token_aware:
        assert token is None
        return
    assert token is not None
    e = embed(ids)
    torch.testing.assert_close(token, e / torch.sqrt((e**2).mean(-1, keepdim=True) + TOKEN_NORM_EPS))
    assert made.shape[-1] + token.shape[-1] == tier.head_input


def test_a_part_as_wide_as_there_are_experts_keeps_its_own_size() -> None:
    """In random heads, what adds to the logits is small; what lies inside is not."""
    tier = dataclasses.replace(tiny_tier(), head_width=8)
    tensors = overlapping_heads(tier, 1.0, 0)
    assert tensors["layers.0.fc1.weight"].std() * tier.head_input**0.5 == pytest.approx(1.0, rel=0.2)
    assert tensors["layers.0.fc2.weight"].std() * 8**0.5 == pytest.approx(0.25, rel=0.4)
