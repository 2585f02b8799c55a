"""Phase 2 in-process: what lies in the run directory afterwards, and what stops it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from edge0_runtime.contract.artifacts import read_adapter
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import sha256_file
from edge0_runtime.contract.provenance import Teacher
from edge0_train.adapters import base_info, input_path
from edge0_train.build import build_student, input_identity
from edge0_train.config import Config
from edge0_train.data.rows import collate, read_card, read_data, write_data
from edge0_train.objectives import mean_loss
from edge0_train.phases.student_sft import student_sft
from edge0_train.phases.teacher_text import teacher_text
from edge0_train.run import open_run
from tests.train.conftest import Make, task_rows
from tests.train.edited_teachers import edited

SMALL = (
    "optim.rows=6", "optim.micro_rows=6", "optim.warmup=0", "logger.every=1", "logger.checkpoint_every=100",
    "sample.max_new_tokens=6", "heads.joint_lr=0",
)  # fmt: skip


@pytest.fixture
def sft_config(make_config: Make, tmp_path: Path):
    return lambda *overrides: make_config("student_sft", f"run_dir={tmp_path / 'run'}", *SMALL, *overrides)


def do(config: Config) -> dict:
    run = open_run(config)
    run.record_inputs(input_identity(config))
    return run.finish(student_sft(config, run))


def test_early_stop_exports_the_best_values(sft_config, capsys):
    """With a rate that is far too high the loss gets worse soon; the exported file gives the best evaluation again."""
    config = sft_config("optim.steps=9", "optim.lr=0.1", "optim.patience=2", "optim.schedule=constant")
    summary = do(config)
    assert summary["steps"] < 9 and summary["best_step"] == summary["steps"] - 2
    assert f"kept: the values of step {summary['best_step']} of {summary['steps']}" in capsys.readouterr().out
    rows = [json.loads(line) for line in (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()]
    best = min(row["held_out_loss"] for row in rows)
    assert summary["held_out_loss"] == best == rows[summary["best_step"] - 1]["held_out_loss"]
    exported = build_student(config, prerouter=input_path(config, "prerouter"), lora=config.run_dir)
    data, _ = read_data(config.text.rows, config.text.max_length)
    found = mean_loss(exported.path, [collate(data.held_out, 0)])
    assert found == pytest.approx(best, rel=2e-3)  # the file is float16
    assert abs(found - rows[-1]["held_out_loss"]) > 5 * abs(found - best)
    lora = read_adapter(Path(config.run_dir) / "lora_edge0_nano.safetensors", "lora")
    assert lora.provenance and lora.provenance.phases[-1].steps == summary["steps"]


def test_the_run_directory_says_what_went_in_and_what_came_out(sft_config):
    config = sft_config("optim.steps=1")
    do(config)
    directory = Path(config.run_dir)
    inputs = json.loads((directory / "inputs.json").read_text())
    info = base_info(config)
    assert inputs["base"] == {
        "fingerprint": info.fingerprint, "tokenizer_sha256": info.tokenizer_hash, "template_sha256": info.template_hash,
        "config": info.identity.config,
    }  # fmt: skip
    assert inputs["text"] == {"fingerprint": read_card(config.text.rows)["fingerprint"], "teacher": None}
    assert inputs["prerouter_sha256"] == sha256_file(input_path(config, "prerouter")) and inputs["lora_sha256"] is None
    samples = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    data, _ = read_data(config.text.rows, config.text.max_length)
    assert len(samples) == 8 and [s["answer"] for s in samples] == [row.answer for row in data.held_out[:8]]
    assert all(s["completion"] and s["prompt"].startswith("<|im_start|>user") for s in samples)


@pytest.mark.parametrize(
    ("part", "field"), [("base", ".fingerprint"), ("text", ".fingerprint"), ("prerouter_sha256", "")]
)
def test_a_resume_on_other_inputs_is_refused(sft_config, part, field):
    config = sft_config("optim.steps=1")
    run = open_run(config)
    identity = input_identity(config)
    run.record_inputs(identity)
    other = json.loads(json.dumps(identity))
    if field:
        other[part]["fingerprint"] = "0" * 64
    else:
        other[part] = "0" * 64
    again = open_run(dataclasses.replace(config, resume=True))
    again.record_inputs(identity)
    with pytest.raises(Edge0Error, match=rf"resume: .*other inputs \({part}{field}: was .*, is 0000.*run_dir"):
        again.record_inputs(other)
    assert json.loads((run.directory / "inputs.json").read_text()) == identity


def teacher_of(config: Config) -> Teacher | None:
    adapter = read_adapter(Path(config.run_dir) / config.tier.file_name("lora"), "lora")
    assert adapter.provenance
    return adapter.provenance.teacher


def test_provenance_names_who_wrote_the_rows_not_who_is_configured(make_config, sft_config, tmp_path, capsys):
    text = make_config(
        "teacher_text", f"teacher.directory={edited(tmp_path / 'writer')}", f"run_dir={tmp_path / 'text'}",
        "sample.prompts=16", "sample.eval_prompts=8", "sample.max_new_tokens=6", "sample.max_truncated=1",
    )  # fmt: skip
    run = open_run(text)
    run.finish(teacher_text(text, run))
    other = edited(tmp_path / "other", tensors=lambda tensors: {name: 2 * value for name, value in tensors.items()})
    config = sft_config("optim.steps=1", f"text.rows={tmp_path / 'text'}", f"teacher.directory={other}")
    do(config)
    written_by = teacher_of(config)
    assert written_by and written_by.id == "writer" and len(written_by.revision) == 64
    assert read_card(tmp_path / "text")["teacher"] == dataclasses.asdict(written_by)
    inputs = json.loads((Path(config.run_dir) / "inputs.json").read_text())
    assert inputs["text"]["teacher"] == dataclasses.asdict(written_by) and "other" not in json.dumps(inputs)
    said = capsys.readouterr().out
    assert "written by writer" in said and "names no teacher" not in said


def test_a_card_that_names_no_teacher_is_said_and_stays_unknown(sft_config, capsys):
    config = sft_config("optim.steps=1")
    do(config)
    assert teacher_of(config) == Teacher("unknown", "unknown")
    assert capsys.readouterr().out.count("names no teacher; provenance will say 'unknown'") == 1


@pytest.mark.parametrize("what", ["tokenizer", "chat template"])
def test_rows_of_another_tokenizer_or_template_are_refused(sft_config, tmp_path, what):
    key = {"tokenizer": "tokenizer_sha256", "chat template": "template_sha256"}[what]
    (tmp_path / "text").mkdir()
    write_data(tmp_path / "text", task_rows("train", 12), task_rows("eval", 8), {key: "0" * 64})
    with pytest.raises(Edge0Error, match=rf"text\.rows: .* was written with another {what} \(000000000000\)"):
        do(sft_config(f"text.rows={tmp_path / 'text'}"))


def test_rows_whose_labels_are_all_masked_are_dropped_and_counted(sft_config, tmp_path, capsys):
    """A row without a completion has no label: it would be a silent no-op."""
    from edge0_train.data.rows import TextRow

    empty = [TextRow((1, 2, 3), (), "stop")] * 5
    (tmp_path / "text").mkdir()
    write_data(tmp_path / "text", [*task_rows("train", 12), *empty], task_rows("eval", 8), {})
    summary = do(sft_config("optim.steps=1", f"text.rows={tmp_path / 'text'}"))
    assert summary["dropped"] == {"empty prompt or completion": 5}
    assert "dropped: 5 empty prompt or completion" in capsys.readouterr().out
    (tmp_path / "none").mkdir()
    write_data(tmp_path / "none", empty, task_rows("eval", 8), {})
    with pytest.raises(Edge0Error, match=r"text\.rows: no train row .* is usable"):
        do(sft_config(f"text.rows={tmp_path / 'none'}", f"run_dir={tmp_path / 'run2'}"))


def test_the_base_is_checked_for_values_that_are_not_finite(sft_config, make_config, tmp_path):
    """NaN in one shard would otherwise show as a NaN loss somewhere."""
    from safetensors.torch import load_file, save_file

    base = tmp_path / "base"
    shutil.copytree(make_config("student_sft").base.directory, base)
    tensors = load_file(str(base / "model.safetensors"))
    for name in ("language_model.model.layers.3.mlp.switch_mlp.up_proj.scales", "language_model.model.norm.weight"):
        broken = {key: value.clone() for key, value in tensors.items()}
        broken[name].view(-1)[5] = float("nan")
        save_file(broken, str(base / "model.safetensors"), metadata={"format": "mlx"})
        config = sft_config(f"base.directory={base}", "inputs.prerouter=")
        with pytest.raises(Edge0Error, match=rf"{name}.*not finite"):
            build_student(config, new_lora=True)
