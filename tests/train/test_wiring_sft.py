"""student_sft as it runs: on the student path, from which adapters, on which rows, at which rates, and what it hands on."""

from __future__ import annotations

import math

import pytest
import torch

from tests.train.conftest import Make
from tests.train.wiring import CLIP, JOINT, RATE, WARMUP, Chain, Plain, heads_in, lora_in, lora_of

LR = RATE / WARMUP
"""Of the first step."""


@pytest.fixture(scope="module")
def chain(make_config: Make, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return Chain(make_config, tmp_path_factory.mktemp("wiring"))


@pytest.fixture(scope="module")
def given(chain: Chain):
    """The heads that it starts from: the newest, not the first."""
    return chain.run("head_refine").adapter("prerouter")


@pytest.fixture(scope="module")
def after_one_step(chain: Chain, given) -> Plain:
    ran = chain.run("student_sft")
    values = ran.values(1)
    return Plain(ran.config, heads_in(values, given.tensors), lora_in(values))


def test_it_begins_as_the_refined_heads_route_the_base(chain: Chain, given) -> None:
    """Cross-entropy of the completions' tokens, over the window's tokens; a new LoRA does nothing yet."""
    ran, rows = chain.run("student_sft"), chain.window(0)
    assert len({len(row.completion_ids) for row in rows}) > 1  # a mean over rows would be another number
    want = Plain(ran.config, given.tensors).mean_loss(rows)
    assert ran.metrics()[0]["loss"] == pytest.approx(want, rel=1e-5)
    assert want != pytest.approx(Plain(ran.config).mean_loss(rows), rel=1e-2)


def test_the_second_step_has_the_first_ones_lora_and_heads(chain: Chain, after_one_step) -> None:
    ran = chain.run("student_sft")
    assert ran.metrics()[1]["loss"] == pytest.approx(after_one_step.mean_loss(chain.window(1)), rel=1e-5)


def test_the_held_out_loss_is_of_held_out_rows_after_the_step(chain: Chain, after_one_step) -> None:
    ran = chain.run("student_sft")
    assert ran.metrics()[0]["held_out_loss"] == pytest.approx(after_one_step.mean_loss(chain.held_out), rel=1e-5)


def test_heads_train_at_their_share_of_the_rate(chain: Chain, given) -> None:
    """AdamW's first step is the rate itself, wherever there is a gradient."""
    ran = chain.run("student_sft")
    assert ran.metrics()[0]["lr"] == pytest.approx(LR)
    moved = {"lora": 0.0, "heads": 0.0}
    for name, value in ran.values(1).items():
        if "lora_A" not in name:  # it has no gradient while B is zero
            kind, before = (
                ("lora", 0.0) if "lora_B" in name else ("heads", torch.as_tensor(given.tensors[name]).float())
            )
            moved[kind] = max(moved[kind], float((value - before).abs().max()))
    assert moved == {"lora": pytest.approx(LR, rel=1e-2), "heads": pytest.approx(JOINT * LR, rel=1e-2)}


def test_every_head_whose_output_routes_trains(chain: Chain) -> None:
    ran = chain.run("student_sft")
    owners = {name.split(".")[1] for name in ran.values(1) if "lora_" not in name}
    assert owners == {str(consumer - 1) for consumer in ran.config.tier.consumers}


def test_gradients_are_clipped_once_as_a_mean_over_the_windows_tokens(chain: Chain) -> None:
    """The first moment after one step is a tenth of the clipped gradient."""
    ran = chain.run("student_sft")
    moments = [value for name, value in ran.state(1).items() if name.startswith("exp_avg:")]
    assert ran.metrics()[0]["gradient_norm"] > 2 * CLIP
    assert 10 * math.sqrt(sum(float(m.square().sum()) for m in moments)) == pytest.approx(CLIP, rel=1e-3)


@pytest.mark.parametrize(
    "setting",
    ["optim.micro_rows=1", "text.pack_length=64", "base.gradient_checkpointing=true", "base.storage=packed"],
)
def test_how_a_window_is_computed_changes_no_training(chain: Chain, setting: str) -> None:
    """Cut into micro-batches, packed into lines, recomputed, or from int4 codes: losses and gradients are the same."""
    plain, other = (
        chain.run("student_sft"),
        chain.run("student_sft", setting, f"run_dir={chain.root / setting.split('=')[0]}"),
    )
    for a, b in zip(plain.metrics(), other.metrics(), strict=True):
        assert all(a[name] == pytest.approx(b[name], rel=1e-3) for name in ("loss", "gradient_norm", "held_out_loss"))
        assert a["valid_tokens"] == b["valid_tokens"]


def test_what_is_written_is_what_the_last_step_left(chain: Chain) -> None:
    ran = chain.run("student_sft")
    last, lora, heads = ran.values(2), lora_of(ran.adapter("lora")), ran.adapter("prerouter").tensors
    for module, pair in lora_in(last).items():
        assert all(torch.equal(file, value.half().float()) for file, value in zip(lora[module], pair, strict=True)), (
            module
        )
    for name, value in last.items():
        assert "lora_" in name or torch.equal(torch.as_tensor(heads[name]), value.half()), name


def test_the_lora_is_bound_to_the_heads_that_trained_beside_it(chain: Chain, given) -> None:
    ran = chain.run("student_sft")
    lora, heads = ran.adapter("lora").provenance, ran.adapter("prerouter")
    assert lora and heads.provenance and heads.sha256 != given.sha256
    assert lora.prerouter_sha256 == heads.sha256
    assert lora.data == heads.provenance.data == chain.source
    assert [record.phase for record in lora.phases] == ["head_distill", "head_refine", "student_sft"]
    assert lora.phases[-1].parents == heads.provenance.phases[-1].parents == {"prerouter": given.sha256}


def test_frozen_heads_stay_out_of_training_and_no_file_of_them_is_written(chain: Chain, given) -> None:
    ran = chain.run("student_sft", "heads.joint_lr=0", f"run_dir={chain.root / 'frozen'}")
    assert all("lora_" in name for name in ran.values(2))
    assert not list(ran.directory.glob("prerouter*"))
    lora = ran.adapter("lora").provenance
    assert lora and lora.prerouter_sha256 == given.sha256


def test_a_lora_that_is_given_is_gone_on_from(chain: Chain, given) -> None:
    start = chain.run("student_sft", "heads.joint_lr=0", "optim.warmup=0", f"run_dir={chain.root / 'start'}")
    more = chain.run(
        "student_sft", "heads.joint_lr=0", f"inputs.lora={start.directory}", f"run_dir={chain.root / 'more'}"
    )
    want = Plain(more.config, given.tensors, lora_of(start.adapter("lora"))).mean_loss(chain.window(0))
    assert more.metrics()[0]["loss"] == pytest.approx(want, rel=1e-5)
    assert want != pytest.approx(start.metrics()[0]["loss"], rel=1e-2)
