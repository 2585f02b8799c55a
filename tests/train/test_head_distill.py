"""Phase 1's loss: one head at a time, inside the forward, equals all of them stored and summed."""

from __future__ import annotations

import gc

import pytest
import torch

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.adapters import input_path
from edge0_train.build import build_student
from edge0_train.data.rows import collate, write_data
from edge0_train.losses import HEAD_LOSSES
from edge0_train.objectives.heads import HeadBatch, distill
from edge0_train.phases import phase_function
from edge0_train.phases.head_distill import head_distill
from edge0_train.run import open_run
from edge0_train.student import PrerouterHeads, RoutingPass, StudentPath
from tests.train.conftest import Make, task_rows


@pytest.fixture(scope="module")
def path(make_config: Make) -> StudentPath:
    config = make_config("student_sft")
    made = build_student(config, prerouter=input_path(config, "prerouter")).path
    assert made.heads
    made.heads.requires_grad_(True)
    return made


def micro_batch(path: StudentPath, pack_length: int = 0) -> HeadBatch:
    batch = collate(task_rows("train", 4), 0, pack_length=pack_length)
    return HeadBatch(batch, path.timeline(batch.decoded_BT, batch.start_BT)[0], len(path.tier.owners))


def new_pass(path: StudentPath, micro: HeadBatch, refining: bool) -> RoutingPass:
    where = micro.batch.decoded_BT, micro.batch.start_BT
    return path.predicted(*where) if refining else path.native(path.tier.k, *where)


def heads_of(path: StudentPath) -> PrerouterHeads:
    assert path.heads
    return path.heads


def taken(heads: PrerouterHeads) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in heads.named_parameters() if p.grad is not None}
    heads.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("loss", HEAD_LOSSES)
@pytest.mark.parametrize("refining", [False, True])
@pytest.mark.parametrize("pack_length", [0, 96])
def test_one_head_at_a_time_equals_the_stored_sum(path, loss, refining, pack_length):
    micro, heads = micro_batch(path, pack_length), heads_of(path)
    routing = new_pass(path, micro, refining)
    routing.capture = True
    with torch.no_grad():
        path.hidden(micro.batch.input_ids_BT, routing, use_cache=False)
    total = torch.zeros(())
    for owner in path.tier.owners:
        head_NE = heads(owner, routing.features[owner][micro.predicted_BT])
        target_NE = routing.router_logits[owner + 1][micro.predicted_BT]
        total = total + HEAD_LOSSES[loss](path.tier.router, head_NE, target_NE, path.tier.k)
    total.backward()
    want, parts = taken(heads), []

    def backward(part: torch.Tensor) -> None:
        parts.append(float(part.detach()))
        part.backward()

    distill(path, heads, new_pass(path, micro, refining), micro, loss, backward)
    got = taken(heads)
    assert len(parts) == len(path.tier.owners) and sum(parts) == pytest.approx(float(total.detach()), rel=1e-6)
    assert got.keys() == want.keys() == dict(heads.named_parameters()).keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("refining", [False, True])
def test_no_more_than_one_owners_features_are_ever_held(path, refining):
    micro, heads = micro_batch(path), heads_of(path)
    shape = (*micro.batch.input_ids_BT.shape, path.tier.head_input)
    held: list[int] = []

    def count() -> int:
        return sum(type(item) is torch.Tensor and item.shape == shape for item in gc.get_objects())

    def backward(part: torch.Tensor) -> None:
        held.append(count())
        part.backward()

    routing = new_pass(path, micro, refining)
    distill(path, heads, routing, micro, "kl", backward)
    assert held == [1] * len(path.tier.owners)
    assert not routing.features and not routing.router_logits and count() == 0
    stored = new_pass(path, micro, refining)
    stored.capture = True
    with torch.no_grad():
        path.hidden(micro.batch.input_ids_BT, stored, use_cache=False)
    assert count() == len(path.tier.owners)  # the count sees what is held
    heads.zero_grad(set_to_none=True)


def test_heads_that_are_no_better_than_a_trivial_baseline_stop_the_run(make_config, tmp_path):
    """After one step at a tiny rate the heads are still the next layer's router: that is one of the baselines."""
    config = make_config(
        "head_distill", f"run_dir={tmp_path / 'run'}", "optim.steps=1", "optim.warmup=0", "optim.lr=1e-9"
    )
    with pytest.raises(
        Edge0Error, match=r"heads: held-out recall@4 0\.\d+ does not beat the trivial baseline \w+ .*optim\.steps=1"
    ):
        head_distill(config, open_run(config))
    assert not (tmp_path / "run" / "prerouter_edge0_nano.safetensors").exists()


@pytest.mark.parametrize("phase", ["head_distill", "student_sft"])
def test_rows_of_another_tokenizer_are_refused(make_config, tmp_path, phase):
    (tmp_path / "text").mkdir()
    write_data(tmp_path / "text", task_rows("train", 12), task_rows("eval", 8), {"tokenizer_sha256": "ab" * 32})
    config = make_config(phase, f"run_dir={tmp_path / 'run'}", f"text.rows={tmp_path / 'text'}", "inputs.lora=")
    with pytest.raises(Edge0Error, match=r"text\.rows: .*text was written with another tokenizer \(abababababab\)"):
        phase_function(phase)(config, open_run(config))


def test_the_base_gets_no_gradient(path):
    micro = micro_batch(path)
    distill(path, heads_of(path), new_pass(path, micro, False), micro, "kl", lambda part: part.backward())
    assert all(p.grad is None for p in path.model.parameters())
    heads_of(path).zero_grad(set_to_none=True)
