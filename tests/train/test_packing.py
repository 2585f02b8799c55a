"""Documents packed into one row are as alone: outputs, routing and gradients (docs/method.md 1.5)."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from edge0_train.data.rows import IGNORE, TextRow, collate, pack
from edge0_train.student import PrerouterHeads, StudentPath, add_lora
from edge0_train.student.packing import Documents
from tests.twins import TWINS

TIER, LING = (
    TWINS[family].tier(k=2, num_experts_per_tok=4, num_hidden_layers=5, lora={"r": 4, "alpha": 8, "targets": targets})
    for family, targets in (
        ("qwen3_5_moe", ["linear_attn.out_proj"]),
        ("bailing_moe_v3", ["attention.v_proj", "attention.o_proj", "attention.kv_b_proj"]),
    )
)
LENGTHS = ((1, 6), (3, 9), (7, 2), (2, 5), (4, 12))
VARIANTS = {
    "gate-executed": TIER,
    "gate-teacher": dataclasses.replace(TIER, feature_topk="teacher"),
    "predicted-executed": dataclasses.replace(TIER, first_token="predicted"),
    "predicted-teacher": dataclasses.replace(TIER, first_token="predicted", feature_topk="teacher"),
    "ling-predicted-teacher": LING,
    "ling-gate-executed": dataclasses.replace(LING, first_token="gate", feature_topk="executed"),
}


@pytest.fixture(scope="module")
def models() -> dict[str, torch.nn.Module]:
    """By family."""
    torch.manual_seed(0)
    made = {tier.family: add_lora(TWINS[tier.family].random(tier), tier) for tier in (TIER, LING)}
    for model in made.values():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
    return made


def student(models: dict[str, torch.nn.Module], variant: str) -> StudentPath:
    torch.manual_seed(1)
    heads = PrerouterHeads(VARIANTS[variant])
    for parameter in heads.parameters():
        parameter.data = 3 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
    return StudentPath(copy.deepcopy(models[VARIANTS[variant].family]), VARIANTS[variant], heads)


def rows() -> list[TextRow]:
    random = torch.Generator().manual_seed(3)
    draw = lambda n: tuple(torch.randint(3, 384, (n,), generator=random).tolist())  # noqa: E731
    return [TextRow(draw(prompt), draw(completion), "stop") for prompt, completion in LENGTHS]


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_rows_equal_rows_alone(models: dict[str, torch.nn.Module], variant: str) -> None:
    """Hidden states, executed sets, and the gradient of every LoRA factor and head."""
    results = []
    for pack_length in (0, 24):
        path = student(models, variant)
        batch = collate(rows(), pad_id=0, pack_length=pack_length)
        assert (len(batch.input_ids_BT) < len(rows())) == bool(pack_length)
        routing = path.predicted(batch.decoded_BT, batch.start_BT)
        at_BT = batch.labels_BT != IGNORE
        hidden_NH = path.hidden(batch.input_ids_BT, routing, use_cache=False).last_hidden_state[at_BT]
        executed = {layer: ids[at_BT].sort(-1).values for layer, ids in routing.executed.items()}
        labels = batch.labels_BT[at_BT]
        order = sorted(range(len(labels)), key=lambda n: (labels[n].item(), hidden_NH[n].sum().item()))
        (hidden_NH * torch.linspace(-1, 1, hidden_NH.shape[1])).sum().backward()
        gradients = {
            n: p.grad for n, p in (*path.model.named_parameters(), *path.heads.named_parameters()) if p.requires_grad
        }
        results.append((hidden_NH[order], {n: ids[order] for n, ids in executed.items()}, gradients))
    (alone, alone_sets, alone_gradients), (packed, packed_sets, packed_gradients) = results
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(packed_sets[layer], alone_sets[layer]) for layer in alone_sets)
    assert alone_gradients and packed_gradients.keys() == alone_gradients.keys()
    for name, gradient in alone_gradients.items():
        if gradient is not None:
            assert (packed_gradients[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


@pytest.mark.parametrize("variant", ["gate-executed", "ling-predicted-teacher"])
def test_a_document_does_not_see_the_one_before(models: dict[str, torch.nn.Module], variant: str) -> None:
    """Changing every token of the first document leaves the second as it was."""
    path = student(models, variant)
    batch = collate(rows()[:2], pad_id=0, pack_length=64)
    second = int(batch.start_BT[0].nonzero()[1])
    outputs = []
    for shift in (0, 1):
        ids = batch.input_ids_BT.clone()
        ids[0, :second] = (ids[0, :second] + shift) % 384
        routing = path.predicted(batch.decoded_BT, batch.start_BT)
        outputs.append(path.hidden(ids, routing, use_cache=False).last_hidden_state[0, second:])
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)


def test_documents_come_apart_and_together() -> None:
    start = torch.tensor([[1, 0, 1, 0, 0], [1, 0, 0, 0, 1]], dtype=torch.bool)
    documents = Documents.of(start)
    x = torch.arange(20.0).view(2, 5, 2)
    apart = documents.take_apart(x)
    assert apart.shape == (4, 4, 2)
    assert apart[1, :3].tolist() == x[0, 2:].tolist() and apart[1, 3].tolist() == [0, 0]
    assert documents.position_BT.tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 0]]
    assert torch.equal(documents.put_together(apart, x.shape), x)


def test_pack_keeps_every_row_and_the_length() -> None:
    lines = pack(rows(), 24)
    assert sorted(row.prompt_ids for line in lines for row in line) == sorted(row.prompt_ids for row in rows())
    assert all(sum(row.length - 1 for row in line) <= 24 for line in lines)
    assert pack(rows(), 5)[0] == [rows()[0]] or len(pack(rows(), 5)) == len(rows())
