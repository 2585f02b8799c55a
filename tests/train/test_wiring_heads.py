"""head_distill and head_refine as they run: on whose routing, from which heads, over which inputs of which rows."""

from __future__ import annotations

import math

import pytest
import torch

from edge0_train.base.load import load_base
from tests.train.conftest import Make
from tests.train.wiring import RATE, ROWS, SEED, STEPS, WARMUP, Chain, Plain, Ran


@pytest.fixture(scope="module")
def chain(make_config: Make, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return Chain(make_config, tmp_path_factory.mktemp("wiring"))


def warm(ran: Ran) -> dict[str, torch.Tensor]:
    """The next layer's router on the hidden state; fc1, whatever it is, is multiplied by a zero."""
    model, _ = load_base(ran.config.base.directory, ran.config.tier, dtype=torch.float32)
    tier, heads = ran.config.tier, {}
    for owner in tier.owners:
        linear = torch.zeros(tier.num_experts, tier.head_input)
        linear[:, : tier.hidden_size] = model.model.layers[owner + 1].mlp.gate.weight
        heads[f"layers.{owner}.linear_init.weight"] = linear
        heads[f"layers.{owner}.fc1.weight"] = torch.ones(tier.head_width, tier.head_input)
        heads[f"layers.{owner}.fc2.weight"] = torch.zeros(tier.num_experts, tier.head_width)
    return heads


def kl(router_E: torch.Tensor, head_E: torch.Tensor) -> float:
    return float((router_E.softmax(-1) * (router_E.log_softmax(-1) - head_E.log_softmax(-1))).sum())


def bce(router_E: torch.Tensor, head_E: torch.Tensor) -> float:
    """Against the four experts that are routed to."""
    chosen = router_E.topk(4).indices.tolist()
    return -sum(math.log((h.sigmoid() if e in chosen else (-h).sigmoid()).item()) for e, h in enumerate(head_E))


def test_distillation_begins_as_the_next_router_on_the_base(chain: Chain) -> None:
    """KL at predicted inputs of the first step's train rows, every layer on its own gate."""
    ran = chain.run("head_distill")
    want = Plain(ran.config, warm(ran), watch=True).mean_pair(chain.window(0), kl)
    assert ran.metrics()[0]["loss"] == pytest.approx(want, rel=1e-5)


def test_distillation_runs_the_base_at_the_served_k(chain: Chain) -> None:
    """Here K=1, whose hidden states are far from those of the base's K=8."""
    ran, rows = (
        chain.run("head_distill", "tier.k=1", "optim.rows=1", "optim.steps=1", f"run_dir={chain.root / 'k1'}"),
        chain.window(0)[:1],
    )
    want, other = (Plain(ran.config, warm(ran), k=k, watch=True).mean_pair(rows, kl) for k in (1, 8))
    assert ran.metrics()[0]["loss"] == pytest.approx(want, rel=1e-5) != pytest.approx(other, rel=1e-3)


def test_the_loss_is_the_one_that_is_configured(chain: Chain) -> None:
    ran = chain.run("head_distill", "heads.loss=bce", "optim.steps=1", f"run_dir={chain.root / 'bce'}")
    want = Plain(ran.config, warm(ran), watch=True).mean_pair(chain.window(0), bce)
    assert ran.metrics()[0]["loss"] == pytest.approx(want, rel=1e-5)


def test_the_second_step_has_the_first_ones_heads_and_rows_of_its_own(chain: Chain) -> None:
    ran = chain.run("head_distill")
    plain = Plain(ran.config, ran.values(1), watch=True)
    assert ran.metrics()[1]["loss"] == pytest.approx(plain.mean_pair(chain.window(1), kl), rel=1e-5)
    assert chain.window(1) != chain.window(0)


def test_refinement_begins_with_the_given_heads_routing(chain: Chain) -> None:
    """The same KL, on the hidden states that the heads' own predictions make."""
    ran, given = chain.run("head_refine"), chain.run("head_distill").adapter("prerouter")
    rows = chain.window(0)
    want = Plain(ran.config, given.tensors).mean_pair(rows, kl)
    assert ran.metrics()[0]["loss"] == pytest.approx(want, rel=1e-5)
    assert want != pytest.approx(Plain(ran.config, given.tensors, watch=True).mean_pair(rows, kl), rel=1e-2)


@pytest.mark.parametrize("phase", ["head_distill", "head_refine"])
def test_recall_and_perplexity_are_of_held_out_rows(chain: Chain, phase: str) -> None:
    """Recall under native routing in both phases; perplexity with the heads committed, and native."""
    ran = chain.run(phase)
    start = warm(ran) if phase == "head_distill" else chain.run("head_distill").adapter("prerouter").tensors
    end, rows = ran.adapter("prerouter").tensors, chain.held_out
    assert ran.summary["recall"]["before"] == pytest.approx(Plain(ran.config, start, watch=True).recall(rows), abs=1e-3)
    native = Plain(ran.config, end, watch=True)
    assert ran.summary["recall"]["heads"] == pytest.approx(native.recall(rows), abs=6e-3)  # the file is float16
    found = ran.summary["perplexity"]
    assert found["native"] == pytest.approx(math.exp(native.mean_loss(rows)), rel=1e-3)
    assert found["committed"] == pytest.approx(math.exp(Plain(ran.config, end).mean_loss(rows)), rel=1e-2)
    assert found["committed"] != pytest.approx(found["native"], rel=2e-2), "else neither could be told from the other"


@pytest.mark.parametrize("phase", ["head_distill", "head_refine"])
def test_heads_move_by_the_rate_of_the_warm_up(chain: Chain, phase: str) -> None:
    """AdamW's first step is the rate itself, wherever there is a gradient."""
    ran = chain.run(phase)
    assert [row["lr"] for row in ran.metrics()] == pytest.approx([RATE / WARMUP, 2 * RATE / WARMUP])
    given = warm(ran) if phase == "head_distill" else chain.run("head_distill").adapter("prerouter").tensors
    for name, value in ran.values(1).items():
        if "fc1" not in name:
            moved = float((value - torch.as_tensor(given[name]).float()).abs().max())
            assert moved == pytest.approx(RATE / WARMUP, rel=1e-2), name


@pytest.mark.parametrize("phase", ["head_distill", "head_refine"])
def test_packing_rows_into_lines_changes_no_training(chain: Chain, phase: str) -> None:
    packed = chain.run(phase, "text.pack_length=64", "optim.micro_rows=3", f"run_dir={chain.root / phase}-packed")
    for a, b in zip(chain.run(phase).metrics(), packed.metrics(), strict=True):
        assert all(a[name] == pytest.approx(b[name], rel=1e-4) for name in ("loss", "gradient_norm", "valid_tokens"))


def test_what_is_written_is_what_the_last_step_left(chain: Chain) -> None:
    for phase in ("head_distill", "head_refine"):
        ran = chain.run(phase)
        file, last = ran.adapter("prerouter"), ran.values(2)
        assert file.tensors.keys() == last.keys()
        assert all(torch.equal(torch.as_tensor(file.tensors[n]), value.half()) for n, value in last.items())


def test_the_files_say_where_they_come_from(chain: Chain) -> None:
    files = [chain.run(phase).adapter("prerouter").provenance for phase in ("head_distill", "head_refine")]
    assert [file and file.data for file in files] == [chain.source] * 2
    first, second = (file.phases[-1] for file in files if file)
    assert (first.parents, second.parents) == ({}, {"prerouter": chain.run("head_distill").adapter("prerouter").sha256})
    assert (
        (first.seed, first.steps, first.rows) == (second.seed, second.steps, second.rows) == (SEED, STEPS, STEPS * ROWS)
    )
