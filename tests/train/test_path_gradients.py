"""Gradients through the student path, with checkpointing and without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from edge0_train.data.rows import TextRow, collate
from edge0_train.student import StudentPath
from tests.reference_path import (
    STICKY,
    TIER,
    TOKEN_AWARE,
    VARIANTS,
    close,
    gradients,
    lora,
    make,
    probe,
    text_rows,
)


def path_value(path: StudentPath, row: TextRow) -> torch.Tensor:
    batch = collate([row], pad_id=0)
    routing = path.predicted(batch.decoded_BT)
    return probe(path.hidden(batch.input_ids_BT, routing, use_cache=False).last_hidden_state[0])


@pytest.mark.parametrize("name", VARIANTS)
def test_lora_gradient_equals_the_references(adapted, name):
    """Including the part that reaches the LoRA of layer N at t-1 through the head and layer N+1's mixing weights."""
    path, reference = make(adapted, VARIANTS[name])
    row = text_rows([(3, 7)])[0]
    path_value(path, row).backward()
    ids = [*row.prompt_ids, *row.completion_ids][:-1]
    probe(reference.run(ids, [t >= 3 for t in range(len(ids))])[0]).backward()
    got, want = gradients(path.model), gradients(reference.model)
    assert got.keys() == want.keys() and len(got) > 20
    for key in got:
        close(got[key], want[key], 2e-4)
        assert float(want[key].abs().max()) > 0


def test_lora_gradient_equals_finite_differences(adapted):
    path, _ = make(adapted, TIER)
    row = text_rows([(3, 7)])[0]
    path_value(path, row).backward()
    gradient = gradients(path.model)
    random = torch.Generator().manual_seed(7)
    direction = {n: torch.randn(p.shape, generator=random) for n, p in lora(path.model).items()}
    slope = sum(float((gradient[n] * d).sum()) for n, d in direction.items())
    values = []
    with torch.no_grad():
        for step in (1e-4, -1e-4):
            for name, p in lora(path.model).items():
                p += step * direction[name]
            values.append(float(path_value(path, row).double()))
            for name, p in lora(path.model).items():
                p -= step * direction[name]
    assert (values[0] - values[1]) / 2e-4 == pytest.approx(slope, rel=1e-2)


def test_heads_train_through_the_path_only_if_asked(adapted):
    path, _ = make(adapted, TIER)
    row = text_rows([(3, 7)])[0]
    path_value(path, row).backward()
    assert path.heads is not None and all(p.grad is None for p in path.heads.parameters())
    path.heads.requires_grad_(True)
    path_value(path, row).backward()
    for owner in TIER.owners:
        grad = path.heads.layers[str(owner)].fc1.weight.grad
        used = owner + 1 in TIER.consumers
        assert (grad is not None and bool(grad.abs().sum() > 0)) == used, owner


# -- (f) gradient checkpointing ----------------------------------------------------------------------------------------


@contextmanager
def experts_calls(path: StudentPath) -> Iterator[dict[int, list[torch.Tensor]]]:
    """Experts that really ran, by layer and call: once in forward, once more when a layer is recomputed."""
    layers = path.tier.layout.moe_layers(path.tier.architecture)
    calls: dict[int, list[torch.Tensor]] = {n: [] for n in layers}
    handles = [
        path.model.model.layers[n].mlp.experts.register_forward_pre_hook(lambda _, args, n=n: calls[n].append(args[1]))
        for n in calls
    ]
    yield calls
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("name", ["35b", "8b", "ling", *TOKEN_AWARE, *STICKY])
def test_gradient_checkpointing_gives_the_same_gradients_and_experts(adapted, name):
    path, _ = make(adapted, VARIANTS[name])
    row = text_rows([(3, 7)])[0]
    plain_value = path_value(path, row)
    plain_value.backward()
    want = gradients(path.model)
    path.model.activation_checkpointing_enable({"use_reentrant": False})
    path.model.train()
    with experts_calls(path) as calls:
        value = path_value(path, row)
        value.backward()
    assert torch.equal(value, plain_value)
    got = gradients(path.model)
    for key in want:
        close(got[key], want[key], 1e-6)
    for layer, indices in calls.items():
        assert len(indices) == 2, f"layer {layer} was not recomputed"
        assert torch.equal(indices[0], indices[1])


def test_recompute_keeps_the_experts_even_when_the_gate_would_change_its_mind(adapted):
    """Rounding may flip a near-tie between forward and recompute; here the gates are turned round to force it."""
    path, _ = make(adapted, TIER)
    row = text_rows([(3, 7)])[0]
    path.model.activation_checkpointing_enable({"use_reentrant": False})
    path.model.train()
    with experts_calls(path) as calls:
        value = path_value(path, row)
        for layer in range(TIER.num_layers):
            path.router(layer).weight.data.neg_()
        value.backward()
    assert all(torch.equal(*indices) for indices in calls.values())
