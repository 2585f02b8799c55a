"""The teacher: one that does not fit is refused before anything is written, a padded one gives what the plain one gives."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.base.load import load_teacher
from edge0_train.config import Config, asset, configure
from edge0_train.data.rows import collate
from edge0_train.measure.bench import Stage, open_bench
from edge0_train.measure.quality import token_scores
from edge0_train.objectives.scoring import teacher_scores
from edge0_train.phases.evaluate import evaluate
from edge0_train.phases.on_policy import on_policy
from edge0_train.phases.teacher_text import teacher_text
from edge0_train.run import Run, open_run
from edge0_train.teacher import build_teacher, check_teacher
from tests.tiny_models import TEACHER
from tests.train.conftest import Make, task_rows
from tests.train.edited_teachers import edited, padded

PHASES: dict[str, Callable[[Config, Run], Any]] = {
    "teacher_text": teacher_text,
    "on_policy": on_policy,
    "evaluate": evaluate,
}
"""The phases that run a teacher."""


def bin_only(directory: Path) -> Path:
    shutil.copytree(TEACHER, directory)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    return directory


def without_weights(directory: Path) -> Path:
    shutil.copytree(TEACHER, directory)
    (directory / "model.safetensors").unlink()
    return directory


def without_gate(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in tensors.items() if not name.endswith("layers.3.mlp.gate.weight")}


def with_codes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: v.to(torch.int32) if n.endswith("layers.3.mlp.gate.weight") else v for n, v in tensors.items()}


def with_more(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {"more": torch.ones(2)}


def config_text(text: str) -> Callable[[Path], Path]:
    """A teacher whose config.json is that text."""

    def make(directory: Path) -> Path:
        (edited(directory) / "config.json").write_text(text)
        return directory

    return make


def of(**changes: Any) -> Callable[[Path], Path]:
    return lambda directory: edited(directory, **changes)


FOUR = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
FP8 = {"quant_method": "fp8"}
WRONG: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no directory": (lambda path: path, "teacher.directory: .* is no directory; give the transformers directory of"),
    "no config": (lambda path: path.mkdir() or path, "teacher.directory: .* has no config.json"),
    "another family": (lambda path: Path(asset("nano-ling-teacher")), "model_type .*bailing.*, not of qwen3_5_moe"),
    "another K": (of(num_experts_per_tok=4), "num_experts_per_tok: tier nano has 8, config.json has 4"),
    "fewer layers": (of(**FOUR), "num_hidden_layers: tier nano has 8, config.json has 4"),
    "wider": (of(hidden_size=128), "hidden_size: tier nano has 64, config.json has 128"),
    "a smaller vocabulary": (of(vocab_size=320), "vocab_size: tier nano has 384, config.json has 320"),
    "padded in name only": (of(vocab_size=448), r"embed_tokens.weight: BF16 \[384, 64\], the model needs \[448"),
    "only .bin": (bin_only, "has pytorch_model.bin but no model.*safetensors; only safetensors is read"),
    "a tensor missing": (of(tensors=without_gate), "layers.3.mlp.gate.weight: missing"),
    "a tensor too many": (of(tensors=with_more), "more: the model has no place"),
    "codes for values": (of(tensors=with_codes), "layers.3.mlp.gate.weight: I32"),
    "quantised by its config": (of(quantization_config=FP8), "is quantised; give the original"),
    "not JSON": (config_text("{"), "config.json: not strict JSON"),
    "not a model": (of(layer_types=3), "config.json is not a qwen3_5_moe model's config.json"),
}


@pytest.mark.parametrize("dry_run", ["false", "true"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", WRONG)
def test_a_teacher_that_does_not_fit_is_refused_at_the_start(make_config: Make, tmp_path, name, phase, dry_run):
    make, reason = WRONG[name]
    config = make_config(
        phase, f"teacher.directory={make(tmp_path / 'teacher')}", f"run_dir={tmp_path / 'run'}", f"dry_run={dry_run}",
        f"base.source={TEACHER}", "sample.prompts=4", "sample.eval_prompts=4", "sample.max_new_tokens=2", "optim.steps=4",
        "optim.rows=2",
    )  # fmt: skip
    with pytest.raises(Edge0Error, match=f"(?s){reason}"):
        PHASES[phase](config, Run(tmp_path / "run", config))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("phase", PHASES)
def test_an_int4_base_is_no_teacher(make_config: Make, tmp_path, phase):
    config = make_config(phase, f"run_dir={tmp_path / 'run'}")
    config = dataclasses.replace(config, teacher=dataclasses.replace(config.teacher, directory=config.base.directory))
    with pytest.raises(Edge0Error, match=r"teacher\.directory: .*base is quantised; give the original"):
        PHASES[phase](config, Run(tmp_path / "run", config))


def test_a_dry_run_passes_over_weights_that_are_not_there_yet(make_config: Make, tmp_path):
    directory = without_weights(tmp_path / "teacher")
    assert "no weights here yet" in check_teacher(
        make_config("evaluate", f"teacher.directory={directory}", "dry_run=true")
    )
    with pytest.raises(Edge0Error, match=r"teacher\.directory: .* has no model\*\.safetensors; download"):
        check_teacher(make_config("evaluate", f"teacher.directory={directory}"))


def test_another_chat_template_is_refused(make_config: Make, tmp_path):
    directory = edited(tmp_path / "teacher")
    with (directory / "chat_template.jinja").open("a") as file:
        file.write("{# other #}")
    with pytest.raises(Edge0Error, match=r"chat template .* is not the base's.* copy chat_template\.jinja"):
        check_teacher(make_config("evaluate", f"teacher.directory={directory}"))


def test_ids_beyond_the_tiers_vocabulary_are_refused(tmp_path):
    """A padded embedding is cut where no id lies; a tokenizer that reaches further would lose some."""
    directory = padded(tmp_path / "teacher")
    content = json.loads((directory / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][-1], "id": 384, "content": "<|more|>"})
    (directory / "tokenizer.json").write_text(json.dumps(content))
    config = configure("phase=teacher_text", f"root={tmp_path}", f"teacher.directory={directory}")
    with pytest.raises(Edge0Error, match=r"the tokenizer of .* has 385 ids, but tier nano a vocabulary of 384"):
        check_teacher(config)


# -- a padded vocabulary -----------------------------------------------------------------------------------------------


def test_the_uncut_teacher_would_write_ids_that_nobody_has(tmp_path):
    model = load_teacher(padded(tmp_path / "teacher"), dtype=torch.float32)
    logits_TV = model(torch.tensor([task_rows("eval", 1)[0].prompt_ids])).logits[0]
    assert int(logits_TV.argmax(-1).max()) >= 384


def test_a_padded_teacher_writes_the_same_text(make_config: Make, tmp_path, capsys):
    rows = []
    for name, directory in (
        ("plain", edited(tmp_path / "teacher")),
        ("padded", padded(tmp_path / "padded" / "teacher")),
    ):
        config = make_config(
            "teacher_text", f"teacher.directory={directory}", f"run_dir={tmp_path / 'runs' / name}", "sample.prompts=24",
            "sample.eval_prompts=8", "sample.max_new_tokens=8", "sample.temperature=1", "sample.max_truncated=1",
        )  # fmt: skip
        run = open_run(config)
        run.finish(teacher_text(config, run))
        said = "its vocabulary is padded to 448: its logits are cut at the tier's 384, which hold all 384 ids"
        assert (said in " ".join(capsys.readouterr().out.split())) == (name == "padded")
        rows.append([(run.directory / f"{side}.jsonl").read_bytes() for side in ("train", "held_out")])
    assert rows[0] == rows[1]


@pytest.mark.parametrize("tier", ["nano", "nano-ling"])
def test_a_padded_teacher_gives_the_same_scores(tmp_path, tier):
    original = asset(f"{tier}-teacher")
    batch = collate(task_rows("eval", 6), 0)
    scores = []
    for directory in (original, padded(tmp_path / "teacher", original)):
        config = configure("phase=on_policy", f"tier={tier}", f"root={tmp_path}", f"teacher.directory={directory}")
        teacher = build_teacher(config)
        assert not any(parameter.requires_grad for parameter in teacher.model.parameters())
        scores.append(teacher_scores(teacher, batch, 16) | teacher_scores(teacher, batch, 384))
    assert scores[0].keys() == scores[1].keys()
    for name, want in scores[0].items():
        assert torch.equal(want, scores[1][name]), name


def test_a_padded_teacher_measures_the_same(make_config: Make, tmp_path):
    found = []
    for directory in (TEACHER, padded(tmp_path / "teacher")):
        bench = open_bench(make_config("evaluate", f"teacher.directory={directory}"), task_rows("eval", 6))
        found.append(token_scores(bench.student.path, Stage("int4", 8), bench))
    assert found[0] == found[1]
