"""The plan before step 1: the numbers are the model's, and a dry run says the same without weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hydra import initialize_config_dir

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import builtin_tier
from edge0_train import build
from edge0_train.adapters import input_path
from edge0_train.build import build_student, sketch_student
from edge0_train.cli import run_chain
from edge0_train.config import PHASE_NAMES, config_directory, configure
from edge0_train.data.counts import Rows
from edge0_train.data.rows import read_data
from edge0_train.memory import phase_need
from edge0_train.objectives import lora_parameters
from edge0_train.phases.evaluate import evaluate
from edge0_train.phases.export import export
from edge0_train.phases.head_distill import head_distill
from edge0_train.phases.student_sft import _plan, student_sft
from edge0_train.plan import lora_modules
from edge0_train.report import print_plan
from edge0_train.run import Run
from tests.train.conftest import task_rows

REQUIRED = ("teacher.directory=/models/teacher", "text.prompts=tasks")


def config_only(directory: Path, tier_name: str) -> str:
    """A directory with nothing but a config.json of the tier."""
    architecture = dict(builtin_tier(tier_name).architecture)
    text = {"model_type": "qwen3_5_moe_text", "norm_topk_prob": True, "tie_word_embeddings": False, **architecture}
    every = text["full_attention_interval"]
    kinds = ["linear_attention" if (n + 1) % every else "full_attention" for n in range(text["num_hidden_layers"])]
    directory.mkdir()
    (directory / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5_moe", "text_config": text | {"layer_types": kinds}})
    )
    return str(directory)


@pytest.mark.parametrize("joint", [0.0, 0.3])
def test_a_sketch_gives_the_plan_of_the_loaded_model(make_config, joint):
    config = make_config("student_sft", f"heads.joint_lr={joint}", "optim.rows=6", "optim.micro_rows=3")
    data, dropped = read_data(config.text.rows, config.text.max_length)
    rows = Rows.of_data(data, dropped)
    loaded = build_student(config, prerouter=input_path(config, "prerouter"), new_lora=True).path
    sketch = sketch_student(config, lora=True, heads=True)
    assert all(p.is_meta for p in (*sketch.model.parameters(), *sketch.heads.parameters()))
    plan = _plan(config, sketch, rows)
    assert plan == _plan(config, loaded, rows)
    lora = sum(a * b for a, b in config.tier.lora_tensors().values())
    head = sum(a * b for a, b in config.tier.head_parts.values())
    total = sum(p.numel() for p in loaded.model.parameters()) + head * len(config.tier.owners)
    trained = lora + (head * len(config.tier.consumers) if joint else 0)
    assert plan["parameters"] == f"{trained:,} trainable, {total - trained:,} frozen"
    mean = sum(row.length - 1 for row in task_rows("train", 48)) / 48
    assert f"6 rows x {mean:.1f} tokens = {6 * mean:,.0f}" in plan["step"]
    assert f"{config.optim.steps * 6 / 48:.2f} epochs over 48 rows" in plan["step"]
    for setting in ("optim: steps=", "rows=6, micro_rows=3", f"joint_lr={joint}", f"directory={config.base.directory}"):
        assert setting in plan["settings"]


@pytest.mark.parametrize(("tier", "modules", "kinds"), [("nano", 62, 12), ("35b", 310, 12)])
def test_dry_run_needs_a_config_json_alone(make_config, tmp_path, capsys, monkeypatch, tier, modules, kinds):
    """Base without weights, no adapters, no text: modules, parameters and memory are known all the same."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a dry run loads nothing")

    monkeypatch.setattr(build, "load_base", never)
    where = (
        f"tier={tier}", f"base.directory={config_only(tmp_path / 'base', tier)}", f"root={tmp_path / 'root'}",
        "dry_run=true", *REQUIRED,
    )  # fmt: skip
    config = make_config("student_sft", *where)
    assert student_sft(config, Run(tmp_path / "run", config)) == {}
    plan = capsys.readouterr().out
    assert f"{modules} modules matched" in plan and "no text yet" in plan and "at the peak" in plan
    made = lora_modules(sketch_student(config, lora=True, heads=True).model, config.tier)
    assert len(made) == kinds and sum(count for _, count in made) == modules
    config = make_config("head_distill", *where)
    assert head_distill(config, Run(tmp_path / "run", config)) == {}
    heads = sum(a * b for a, b in config.tier.head_tensors().values())
    assert f"{heads:,} trainable" in capsys.readouterr().out
    assert not (tmp_path / "root").exists() and not (tmp_path / "run").exists()


def test_a_dry_run_of_the_whole_chain_says_every_plan_and_then_what_is_missing(tmp_path, capsys):
    """No text and no adapters are needed, which the chain makes; the teacher's weights are. Nothing is written."""
    tier, source = "35b", config_only(tmp_path / "source", "35b")
    settings = (f"teacher.directory={source}", "base.device=cpu", "sample.prompts=40", "optim.steps=4")
    with (
        initialize_config_dir(str(config_directory()), version_base=None),
        pytest.raises(Edge0Error, match=r"base\.source: .*source has no model\*\.safetensors; `python scripts/fetch"),
    ):
        run_chain(
            configure().chain,
            [f"tier={tier}", f"root={tmp_path / 'root'}", "dry_run=true", *REQUIRED, *settings],
        )
    plans = capsys.readouterr().out
    for phase in PHASE_NAMES:
        assert f"{phase}, tier {tier}" in plans, phase
    assert "prerouter auto (not written yet)" in plans and "held-out prompts at most" in plans
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_dry_runs_after_the_phases_say_what_they_found(make_config, tmp_path, capsys):
    for phase, function, words in (
        ("evaluate", evaluate, ["12 held-out prompts", "adapters  prerouter of head_distill"]),
        ("export", export, ["head_distill/prerouter_edge0_nano.safetensors", "lora auto (not written yet)"]),
    ):
        config = make_config(phase, "dry_run=true")
        assert function(config, Run(tmp_path / "run", config)) == {}
        plan = capsys.readouterr().out
        assert all(word in plan for word in words), plan


def test_a_plan_says_how_sticky_routing_is(make_config, capsys):
    for settings, said in (([], " predicted\n"), (["experiment=sticky"], " predicted, sticky (bias 2, window 2)\n")):
        print_plan(make_config("student_sft", *settings), {})
        assert said in capsys.readouterr().out


def test_an_export_is_planned_in_the_dtype_that_it_computes_in(make_config):
    """Its traces are float32 over packed codes, whatever the base trained in."""
    words = [("base.dtype=bfloat16",), ("base.dtype=float32", "base.storage=packed")]
    trained, exact = (make_config("export", *one) for one in words)
    needs = [phase_need(config, Rows.unwritten(config)) for config in (trained, exact)]
    assert needs[0] == needs[1] and "frozen values (int4 base)" in needs[0].device


def test_dry_run_before_quantize_reads_the_source(make_config, tmp_path):
    config = make_config("student_sft", f"base.directory={tmp_path / 'later'}")
    assert len(lora_parameters(sketch_student(config, lora=True, heads=True))) == 2 * 62


def test_a_plan_needs_no_config_json_either(make_config, tmp_path):
    """On a bare machine the tier itself says its shapes."""
    nowhere = (f"base.directory={tmp_path / 'later'}", f"base.source={tmp_path / 'gone'}")
    there = (f"base.directory={config_only(tmp_path / 'base', '35b')}",)
    bare, there = (make_config("student_sft", "tier=35b", *where) for where in (nowhere, there))
    shapes = [
        {name: p.shape for name, p in sketch_student(config, lora=True, heads=True).model.named_parameters()}
        for config in (bare, there)
    ]
    assert shapes[0] == shapes[1]


def test_dry_run_of_another_tier_names_the_field(make_config, tmp_path):
    config = make_config("student_sft", f"base.directory={config_only(tmp_path / 'base', '35b')}")
    with pytest.raises(Edge0Error, match="hidden_size"):
        sketch_student(config, lora=True, heads=True)


def test_checkpointing_lowers_the_estimate(make_config):
    def estimate(*overrides: str) -> float:
        config = make_config("student_sft", *overrides)
        plan = _plan(config, sketch_student(config, lora=True, heads=True), Rows.of(task_rows("train", 4), 1, {}))
        return float(plan["memory"].split("about ")[1].split(" GiB")[0])

    assert estimate("base.gradient_checkpointing=true") < 0.5 * estimate()


def test_frozen_bytes_are_counted_in_the_bases_dtype(make_config):
    plans = []
    for dtype in ("float32", "bfloat16"):
        config = make_config("student_sft", f"base.dtype={dtype}", "optim.micro_rows=1")
        path = sketch_student(config, lora=True, heads=True)
        frozen = sum(p.numel() * p.element_size() for p in path.model.parameters() if not p.requires_grad)
        plan = _plan(config, path, Rows.of(task_rows("train", 4), 1, {}))
        plans.append((frozen, plan["memory"]))
        assert f"{dtype} base" in plan["memory"]
    assert 0.5 <= plans[1][0] / plans[0][0] < 0.51
    assert torch.get_default_dtype() == torch.float32
