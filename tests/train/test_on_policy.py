"""Phase 3's parts: the teacher's scores, every loss on the student path, what is said of a round."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from edge0_runtime.contract.artifacts import read_adapter
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import builtin_tier
from edge0_train.base import load_teacher
from edge0_train.build import warm_heads
from edge0_train.config import Config, asset, configure
from edge0_train.data.health import repetition
from edge0_train.data.rows import IGNORE, TextRow, collate
from edge0_train.inputs import check_inputs
from edge0_train.losses import ON_POLICY_LOSSES, forward_kl, reverse_kl, reverse_kl_no_tail, sampled_token
from edge0_train.objectives import ScoredBatch, scoring
from edge0_train.objectives import on_policy as objective
from edge0_train.objectives.scoring import Scored, score, teacher_scores
from edge0_train.phases.student_sft import student_sft
from edge0_train.run import open_run
from edge0_train.student import StudentPath
from tests.train.conftest import Make

# The package's attribute of that name is the phase's function.
on_policy: ModuleType = importlib.import_module("edge0_train.phases.on_policy")
TOP_K = 8
SMALL = ("optim.warmup=0", "logger.every=1", "sample.max_new_tokens=6", "heads.joint_lr=0")
ROWS = [TextRow((1, 267, 30, 40), (50, 60, 70, 2), "stop"), TextRow((1, 5), (9, 9), "length")]


def config(*overrides: str) -> Config:
    return configure("phase=on_policy", "tier=nano", *overrides)


@pytest.fixture(scope="module")
def path() -> StudentPath:
    """The embedded teacher with untrained heads: teacher and student at once."""
    tier = builtin_tier("nano")
    made = StudentPath(load_teacher(asset("nano-teacher"), dtype=torch.float32), tier)
    made.heads = warm_heads(made).requires_grad_(False)
    return made


@pytest.fixture(scope="module")
def scored(path: StudentPath) -> ScoredBatch:
    batch = collate(ROWS, pad_id=0)
    tensors = teacher_scores(path, batch, TOP_K)
    assert tensors.pop("lengths").tolist() == [4, 2]
    return ScoredBatch(batch, Scored(**tensors))


def dense_logits(path: StudentPath, micro: ScoredBatch, native: bool) -> torch.Tensor:
    """Logits [N, V] at the completions' labels, for all tokens at once."""
    batch = micro.batch
    routing = path.native(path.tier.base_k) if native else path.predicted(batch.decoded_BT)
    with torch.no_grad():
        hidden = path.hidden(batch.input_ids_BT, routing, use_cache=False).last_hidden_state
        return path.model.lm_head(hidden[batch.labels_BT != IGNORE]).float()


def test_scores_are_the_teachers_view_of_every_completion_token(path, scored):
    logp_NV = dense_logits(path, scored, native=True).log_softmax(-1)
    found = scored.scored
    assert found.sampled_C.tolist() == [50, 60, 70, 2, 9, 9]
    torch.testing.assert_close(found.sampled_logp_C, logp_NV.gather(-1, found.sampled_C[:, None])[:, 0])
    values, ids = logp_NV.topk(TOP_K, -1)
    assert torch.equal(found.ids_CS, ids)
    torch.testing.assert_close(found.logp_CS, values)
    total = found.logp_CS.exp().sum(-1) + found.log_tail_C.exp()
    torch.testing.assert_close(total, torch.ones(6), atol=1e-5, rtol=0)


def test_every_loss_of_the_configuration_is_there():
    assert [config(f"on_policy.loss={name}").on_policy.loss for name in ON_POLICY_LOSSES] == [*ON_POLICY_LOSSES]
    fields = {f.name for f in dataclasses.fields(Scored)}
    assert all(set(loss.targets) <= fields for loss in ON_POLICY_LOSSES.values())


@pytest.mark.parametrize("kind", ON_POLICY_LOSSES)
def test_loss_and_masses_equal_the_dense_form(path, scored, kind):
    value, said = objective.rollout_loss(path, kind, scored)
    logits, teacher = dense_logits(path, scored, native=False), scored.scored
    buckets = (teacher.ids_CS, teacher.logp_CS, teacher.log_tail_C)
    want = {
        "reverse_kl": reverse_kl(logits, *buckets),
        "forward_kl": forward_kl(logits, *buckets),
        "reverse_kl_no_tail": reverse_kl_no_tail(logits, *buckets),
        "sampled_token": sampled_token(logits, teacher.sampled_C, teacher.sampled_logp_C),
    }[kind]
    assert float(value) == pytest.approx(float(want), rel=1e-4)
    mass = float(logits.softmax(-1).gather(-1, teacher.ids_CS).sum())
    assert said == {
        "teacher_mass": pytest.approx(float(teacher.logp_CS.exp().sum())),
        "student_mass": pytest.approx(mass),
    }
    assert 0 < said["student_mass"] <= scored.valid and 0 < said["teacher_mass"] <= scored.valid


@pytest.mark.parametrize("kind", ON_POLICY_LOSSES)
def test_every_loss_sends_a_gradient_through_the_path(path, scored, kind):
    weight = path.model.model.layers[0].linear_attn.out_proj.weight.requires_grad_()
    try:
        objective.rollout_loss(path, kind, scored)[0].backward()
        assert weight.grad is not None and bool(weight.grad.abs().sum() > 0)
    finally:
        weight.grad = None
        weight.requires_grad_(False)


def test_scores_of_an_older_version_are_an_error_that_names_them(tmp_path: Path):
    """A resumed run must not train with scores that lack what its loss needs."""
    old = {"ids_CS": torch.zeros(6, 8), "logp_CS": torch.zeros(6, 8), "log_tail_C": torch.zeros(6)}
    save_file(old | {"lengths": torch.tensor([4, 2])}, str(tmp_path / "scores-00000000.safetensors"))
    scorer: Any = None
    with pytest.raises(Edge0Error, match="lacks sampled_C, sampled_logp_C"):
        score(config(), tmp_path, scorer, 0, ROWS)


@pytest.fixture(scope="module")
def trained(make_config: Make, tmp_path_factory: pytest.TempPathFactory):
    """A short phase 3 from a one-step LoRA: overrides -> the LoRA's tensors and the run directory."""
    root = tmp_path_factory.mktemp("on_policy")
    sft = make_config("student_sft", f"run_dir={root / 'sft'}", "optim.steps=1", "optim.rows=4", *SMALL)
    student_sft(sft, open_run(sft))

    def run(name: str, *overrides: str) -> tuple[dict[str, Any], Path]:
        made = make_config(
            "on_policy", f"run_dir={root / name}", f"inputs.lora={root / 'sft'}", "optim.steps=4", "on_policy.rounds=2",
            "optim.rows=4", "sample.batch=4", "sample.max_truncated=1", "sample.max_repetitive=1", *SMALL, *overrides,
        )  # fmt: skip
        on_policy.on_policy(made, open_run(made))
        return dict(read_adapter(root / name / "lora_edge0_nano.safetensors", "lora").tensors), root / name

    return run


def test_a_teacher_that_is_not_resident_scores_the_same_and_is_gone_afterwards(trained, monkeypatch):
    """Loaded once a round, never two at a time, and none while the student trains."""
    alive: list[weakref.ref[torch.nn.Module]] = []
    while_training: list[int] = []
    build, loss = scoring.build_teacher, objective.rollout_loss

    def counted(made: Config) -> StudentPath:
        assert not any(one() for one in alive)
        teacher = build(made)
        alive.append(weakref.ref(teacher.model))
        return teacher

    def watched(*arguments: Any) -> Any:
        while_training.append(sum(one() is not None for one in alive))
        return loss(*arguments)

    monkeypatch.setattr(scoring, "build_teacher", counted)
    monkeypatch.setattr(objective, "rollout_loss", watched)
    resident, _ = trained("resident")
    assert len(alive) == 1 and set(while_training) == {1}
    del alive[:], while_training[:]
    gc.collect()
    visiting, _ = trained("visiting", "teacher.resident=false")
    assert len(alive) == 2 and set(while_training) == {0}
    assert all(np.array_equal(visiting[name], value) for name, value in resident.items())


class Place(str):
    """Stands for a tensor's values, of which only the place is known."""

    def cpu(self) -> Place:
        return Place("cpu")

    def to(self, device: torch.device) -> Place:
        return Place(device)


def test_a_waiting_student_leaves_the_device_and_comes_back_as_it_was():
    """Codes that lie in host memory or on disk (base.residency) stay there: they were never on the device."""
    places = ("cuda:1", "cpu", "cuda:0")
    one, codes, other = (SimpleNamespace(device=torch.device(place), data=Place(place)) for place in places)
    model: Any = SimpleNamespace(parameters=lambda: [one], buffers=lambda: [codes, other])
    before = codes.data

    def failing() -> None:
        with scoring.in_host_memory(model):
            assert [one.data, other.data] == ["cpu", "cpu"] and codes.data is before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert [one.data, other.data] == ["cuda:1", "cuda:0"] and codes.data is before


def test_the_plan_counts_a_resident_teacher_alone(path):
    for flag in ("true", "false"):
        memory = on_policy._plan(config(f"teacher.resident={flag}"), path)["memory"]
        assert ("the teacher, as many values as the base" in memory) == (flag == "true")


def test_predictability_weighs_in_on_rollouts_too(trained):
    """The same split as in SFT; the first step's loss is the loss alone plus the weighted divergence."""
    _, directory = trained("predictable", "heads.predictability=0.01")
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["loss"] == pytest.approx(row["loss_alone"] + 0.01 * row["routing_kl"]) and row["routing_kl"] > 0.1


def test_configuration_is_checked():
    assert config().on_policy.loss == "reverse_kl"
    with pytest.raises(Edge0Error, match=r"on_policy.loss: 'kl' is unknown; choose one of reverse_kl, forward_kl"):
        config("on_policy.loss=kl")
    with pytest.raises(Edge0Error, match=r"on_policy.top_k: 385 is larger than the vocabulary of 384"):
        config("on_policy.top_k=385")
    assert config("on_policy.top_k=384").on_policy.top_k == 384


def test_sampled_token_wants_the_students_own_samples(tmp_path: Path):
    own = ("on_policy.loss=sampled_token", "inputs.prerouter=a", "inputs.lora=b", f"run_dir={tmp_path}")
    with pytest.raises(Edge0Error, match=r"temperature 0.7 and top_p 1.0; on_policy.loss=sampled_token"):
        check_inputs(config(*own, "sample.temperature=0.7"))


def test_spare_prompts_stand_in_for_those_that_are_too_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The source has enough; only a source that has not is an error, which says what was dropped."""
    lines = [f"{'long ' * (30 * (n % 2))}{n}?" for n in range(120)]
    rows = [json.dumps({"messages": [{"role": "user", "content": line}]}) + "\n" for line in lines]
    for name, count in (("enough", 120), ("short", 40)):
        (tmp_path / f"{name}.jsonl").write_text("".join(rows[:count]))
    teacher = asset("nano-teacher")
    own = (f"base.directory={teacher}", "dry_run=true", "optim.steps=4", "optim.rows=10", f"run_dir={tmp_path / 'run'}")
    run: Any = None
    assert on_policy.on_policy(config(*own, f"text.prompts={tmp_path / 'enough.jsonl'}"), run) == {}
    assert "4 of 10 completions" in capsys.readouterr().out
    with pytest.raises(Edge0Error, match=r"text\.prompts: \d+ prompts \(dropped: .*max_length=64.* need 40"):
        on_policy.on_policy(config(*own, f"text.prompts={tmp_path / 'short.jsonl'}"), run)


def test_repetition_counts_4_grams_written_before():
    assert repetition([1, 2, 3, 4, 5]) == 0
    assert repetition([1, 2, 3]) == 0
    assert repetition([1] * 7) == pytest.approx(3 / 4)
    assert repetition([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
