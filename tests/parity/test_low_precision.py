"""Predictions stay float32 in a model that computes in bfloat16: both sides choose and weigh alike, as training meant it.

On a CPU the runtime computes in float32, where nothing of this shows; here it is made to compute in what the files have.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import torch

from benchmarks.budgets import budget_for
from edge0_runtime import loading
from edge0_runtime.arms import ARMS, arm_class
from edge0_runtime.contract.artifacts import read_adapter
from edge0_runtime.contract.tier import Router, Sticky, Tier, builtin_tier
from edge0_runtime.engine import Engine
from edge0_runtime.routing import Routing, predicted
from edge0_runtime.sequence import Sequence
from edge0_runtime.step import Step
from edge0_train.base import load_base, quantize_checkpoint
from edge0_train.student import PrerouterHeads, StudentPath
from edge0_train.student.router import select
from tests.random_adapters import random_heads, write_adapters
from tests.tiny_models import TEACHER
from tests.twins import TWINS

TIERS = {
    "softmax_topk": builtin_tier("nano"),
    "wider mass": dataclasses.replace(builtin_tier("nano"), router=Router("softmax_topk", mass_k=8)),
    "sigmoid_group": builtin_tier("nano-ling"),
}
TIERS |= {
    f"{name}, sticky": dataclasses.replace(
        TIERS[name], router=dataclasses.replace(TIERS[name].router, sticky=Sticky(0.5, 2))
    )
    for name in ("softmax_topk", "sigmoid_group")
}
TEACHERS = {"qwen3_5_moe": TEACHER, "bailing_moe_v3": TEACHER.with_name("nano-ling-teacher")}


@pytest.fixture
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines compute in what the files have, as on Metal."""
    monkeypatch.setattr(loading, "needs_float32", lambda: False)


def warm_heads(path: StudentPath) -> PrerouterHeads:
    """As training starts them, fc2 not quite zero."""
    torch.manual_seed(0)
    heads = PrerouterHeads(path.tier)
    heads.warm_start(lambda layer: path.router(layer).weight.detach())
    for name, value in heads.named_parameters():
        if "fc2" in name:
            torch.nn.init.normal_(value, std=0.03)
    return heads


class Basis(nn.Module):
    """In the place of a block's experts: expert e gives the unit vector e, so that the block's output is its weights."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        return (indices[..., None] == mx.arange(x.shape[-1])).astype(x.dtype)


class Nothing(nn.Module):
    def __call__(self, x: mx.array) -> mx.array:
        return mx.zeros_like(x)


@pytest.fixture(scope="module", params=TIERS)
def nano(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tier, Path, StudentPath]:
    """(tier, model directory, bfloat16 student) of an embedded teacher in int4 with warm heads."""
    tier = TIERS[request.param]
    directory = tmp_path_factory.mktemp(tier.name) / "int4"
    quantize_checkpoint(TEACHERS[tier.family], directory, tier)
    model, _ = load_base(directory, tier, dtype=torch.bfloat16)
    heads = warm_heads(StudentPath(model, tier))
    write_adapters(directory, tier, {key: value.astype(np.float16) for key, value in heads.tensors().items()})
    heads.load(read_adapter(directory / tier.file_name("prerouter"), "prerouter").tensors)
    return tier, directory, StudentPath(model, tier, heads)


def test_both_sides_make_the_same_of_a_prediction(nano: tuple[Tier, Path, StudentPath], bfloat16: None) -> None:
    """Every predicted layer's block of both libraries in bfloat16, on the student's own predictions: experts and weights."""
    tier, directory, path = nano
    ids_BT = torch.from_numpy(np.random.default_rng(0).integers(3, tier.architecture["vocab_size"], size=(8, 60)))
    decoded_BT = (torch.arange(60) >= 2).expand(8, 60)
    executed: dict[int, tuple[torch.Tensor, ...]] = {}
    for layer in tier.consumers:
        path.router(layer).register_forward_hook(lambda *call, layer=layer: executed.update({layer: call[2]}))
    routing = path.predicted(decoded_BT)
    with torch.no_grad():
        path.hidden(ids_BT, routing, use_cache=False)
    assert routing.predicted_BT is not None
    by_head_N = routing.predicted_BT.flatten()
    count = rounded_otherwise = 0
    with Engine.load(directory, lora=False) as engine:
        for layer in tier.consumers:
            _, weights_NK, experts_NK = executed[layer]
            wanted_NE = torch.zeros(len(experts_NK), tier.num_experts).scatter_(1, experts_NK, weights_NK.float())
            logits_NE = routing.predictions[layer - 1].flatten(0, 1)[by_head_N]
            bonus_NE = bonus(tier, routing.executed[layer]).flatten(0, 1)[by_head_N]
            gained = mx.array(bonus_NE.numpy()) if tier.router.sticky else None
            got_NE = served_weights(engine, layer, predicted(tier.router, mx.array(logits_NE.numpy()), tier.k, gained))
            wanted_NE = wanted_NE[by_head_N].numpy()
            assert np.array_equal(got_NE > 0, wanted_NE > 0)
            assert (np.abs(got_NE - wanted_NE) <= 2**-8 * wanted_NE).all()  # one bit of bfloat16
            count += len(logits_NE)
            rounded = select(tier.router, (logits_NE + bonus_NE).bfloat16(), tier.k).sort(-1).values
            rounded_otherwise += int((rounded != experts_NK[by_head_N].sort(-1).values).any(-1).sum())
    assert count >= 2000 and rounded_otherwise > count / 200  # what this test is there to see


def bonus(tier: Tier, ran_BTK: torch.Tensor) -> torch.Tensor:
    """[B, T, E] of a sticky tier (docs/method.md 1.7), 0 of a plain one."""
    ran_BTE = torch.zeros(*ran_BTK.shape[:2], tier.num_experts).scatter_(-1, ran_BTK, 1.0)
    recent_BTE = torch.zeros_like(ran_BTE)
    for ago in range(1, tier.router.sticky.window + 1):
        recent_BTE[:, ago:] += ran_BTE[:, :-ago]
    return tier.router.sticky.bias * (recent_BTE > 0)


def served_weights(engine: Engine, layer: int, routing: Routing) -> np.ndarray:
    """[N, E], each expert's weight in the output of a layer's block that is routed so."""
    block: Any = engine.model.network.layers[layer].mlp
    names = [name for name in ("switch_mlp", "shared_expert", "shared_experts") if name in block]
    kept = {name: block[name] for name in names}
    block.update_modules({name: Basis() if name == "switch_mlp" else Nothing() for name in names}, strict=False)
    engine.model.running.step = Step(route=lambda *_: routing)
    assert routing.logits_TE is not None
    x = mx.random.normal((1, len(routing.logits_TE), engine.model.tier.hidden_size)).astype(mx.bfloat16)
    output = block(x)
    assert output.dtype == mx.bfloat16
    block.update_modules(kept)
    return np.array(output[0, :, : engine.model.tier.num_experts].astype(mx.float32))


# -- served token by token


def close_heads(tier: Tier) -> dict[str, np.ndarray]:
    """Random heads whose logits lie close together around 4: routing is another one as soon as they are rounded."""
    heads = {key: value * np.float16(0.004) for key, value in random_heads(tier).items()}
    for key, value in heads.items():
        if "linear_init" in key:
            value[:, tier.head_columns["routing"]] += 4 / tier.k  # of which K are one
    return heads


@pytest.fixture(scope="module", params=TWINS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tier, Path]:
    """(tier, model directory) of a random twin with close heads."""
    twin, root = TWINS[request.param], tmp_path_factory.mktemp(request.param)
    tier = twin.tier(first_token="predicted", num_experts_per_tok=4)
    quantize_checkpoint(twin.write(root / "source", num_experts_per_tok=4), root / "int4", tier)
    write_adapters(root / "int4", tier, close_heads(tier))
    return tier, root / "int4"


def hold(engine: Engine, slots: int) -> None:
    """Stream through that many slots."""
    engine.set_memory_budget(budget_for(engine.model, slots, widened=engine.model.widened) / 2**30)


@pytest.mark.parametrize("slots", [3, None])
def test_what_runs_is_what_the_heads_say_in_float32(tiny: tuple[Tier, Path], slots: int | None, bfloat16: None) -> None:
    """At every decode step and predicted layer, streamed or not; the model itself stays in bfloat16."""
    tier, directory = tiny
    heads = PrerouterHeads(tier)
    heads.load(close_heads(tier))
    layers = tier.layout.moe_layers(tier.architecture)
    rounded_otherwise = 0
    with Engine.load(directory, lora=False) as engine:
        if slots is not None:
            hold(engine, slots)
        sequence = Sequence(engine.model)
        logits_V = sequence.prefill([5, 80, 7, 31], last=True)
        assert logits_V is not None and engine.model.heads is not None
        for _ in range(12):
            assert sequence.last is not None and logits_V.dtype == mx.bfloat16
            assert all(x_D.dtype == mx.bfloat16 for x_D in sequence.last.inputs.values())
            seen_OF = torch.from_numpy(
                np.concatenate([np.array(part) for part in sequence.last.features], axis=-1)
            ).float()
            logits_V = sequence.decode(int(logits_V.argmax()))
            for layer in tier.consumers:
                with torch.no_grad():
                    logits_1E = heads(layer - 1, seen_OF[None, engine.model.heads.owners.index(layer - 1)])
                wanted, rounded = (
                    select(tier.router, logits, tier.k).sort().values.tolist()[0]
                    for logits in (logits_1E, logits_1E.half())
                )
                assert sequence.last.executed()[layers.index(layer)].tolist() == wanted
                rounded_otherwise += rounded != wanted
        sequence.decode(5)  # judges the step before
        assert engine.stats()["dropped_experts"] == 0
    assert rounded_otherwise > 3


def test_in_every_arm_the_experts_that_were_read_are_those_that_run(tiny: tuple[Tier, Path], bfloat16: None) -> None:
    """Bit by bit the same with few slots as with all; arms on own gates are one model in bfloat16 too."""
    _, directory = tiny
    runs = {}
    for arm in ARMS:
        with Engine.load(directory, arm=arm, lora=False) as engine:
            for slots in (None, 3) if arm_class(arm).streams else (None,):
                if slots is not None:
                    hold(engine, slots)
                steps = engine.generate([5, 80, 7, 31], max_tokens=6, ignore_eos=True, trace=True)
                runs[arm, slots] = [(step.token, step.experts.tobytes(), step.logits.tobytes()) for step in steps]
                assert engine.stats()["dropped_experts"] == 0
            assert all(run == runs[arm, None] for (name, _), run in runs.items() if name == arm)
    assert all(run == runs["resident", None] for (arm, _), run in runs.items() if arm_class(arm).exact)
