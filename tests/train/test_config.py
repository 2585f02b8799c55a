"""Every phase with every tier composes; what is wrong is one sentence that names the field."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import builtin_tier, builtin_tier_names
from edge0_train.config import PHASE_NAMES, config_directory, configure, read_config, to_dict

ROOT = Path(__file__).parents[2]
REQUIRED = ["teacher.directory=/models/teacher", "text.prompts=/data/prompts.jsonl"]


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (config_directory() / group).glob("*.yaml"))


def error_of(*overrides: str) -> str:
    with pytest.raises(Edge0Error) as error:
        configure(*overrides)
    message = str(error.value)
    assert "\n" not in message and len(message) < 1000
    return message


# -- composing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", names("tier"))
@pytest.mark.parametrize("phase", PHASE_NAMES)
def test_every_phase_composes_with_every_tier(phase, tier):
    made = configure(f"phase={phase}", f"tier={tier}", *REQUIRED)
    assert made.phase == phase and made.tier == builtin_tier(tier)
    assert made.run_dir == f"runs/{tier}/{phase}" and made.root == f"runs/{tier}"
    assert made.base.source == made.teacher.directory == "/models/teacher"
    assert made.optim.rows % made.optim.micro_rows == 0
    if phase == "on_policy":
        assert made.optim.steps % made.on_policy.rounds == 0
        assert made.inputs.prerouter and made.inputs.lora
    if phase in ("head_distill", "student_sft"):
        assert made.text.rows == f"runs/{tier}/teacher_text"
    assert not made.resume and not made.dry_run
    assert list(made.chain) == [name for name in PHASE_NAMES if name in made.chain], "the chain is in the phases' order"


def test_groups_hold_what_the_code_knows():
    assert set(names("tier")) == set(builtin_tier_names())


@pytest.mark.parametrize("tier", ["nano", "nano-ling"])
@pytest.mark.parametrize("phase", PHASE_NAMES)
def test_a_tier_with_an_embedded_teacher_needs_only_its_name(phase, tier):
    made = configure(f"phase={phase}", f"tier={tier}")
    assert made.tier.name == tier and made.base.device == "cpu" and made.base.dtype == "float32"
    assert made.teacher.directory == str(ROOT / f"edge0_train/assets/{tier}-teacher")


@pytest.mark.parametrize("name", names("experiment"))
def test_every_experiment_composes_and_changes_something(name):
    """Whatever the order of the words; the command line wins over the experiment too."""
    plain, made = configure("phase=student_sft"), configure("phase=student_sft", f"experiment={name}")
    assert made != plain and (made.phase, made.tier.name) == ("student_sft", "nano")
    assert configure(f"experiment={name}", "phase=student_sft") == made
    assert configure(f"experiment={name}", "heads.predictability=0.5").heads.predictability == 0.5


def test_predictability_is_an_experiment_and_off_by_default():
    assert configure("phase=student_sft").heads.predictability == 0
    assert configure("phase=student_sft", "experiment=predictable").heads.predictability == 0.01


def test_overrides_on_the_command_line_win_over_everything():
    made = configure("phase=on_policy", "optim.lr=7", "optim.steps=8", "tier.k=3", "root=/r", "sample.batch=5")
    assert (made.optim.lr, made.optim.steps, made.tier.k, made.sample.batch) == (7.0, 8, 3, 5)
    assert made.run_dir == "/r/on_policy" and isinstance(made.optim.lr, float)


def test_the_resolved_config_reads_back_as_itself():
    for tier in names("tier"):
        made = configure(f"tier={tier}", *REQUIRED)
        text = yaml.safe_dump(to_dict(made))
        assert "${" not in text and "???" not in text
        assert read_config(yaml_config(yaml.safe_load(text))) == made


def yaml_config(data: dict[str, Any]) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create(data)


def test_a_config_cannot_be_changed():
    made = configure()
    for part in (made, made.optim, made.tier):
        assert dataclasses.is_dataclass(part)
        with pytest.raises(dataclasses.FrozenInstanceError):
            part.k = 3  # type: ignore[union-attr, misc]


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["tier=35b", "phase=teacher_text"], ["teacher.directory", "text.prompts", "not set"]),
        (["tier=35b", "phase=on_policy", "text.prompts=tasks"], ["teacher.directory", "not set"]),
        (["tier.k=33"], ["tier.k", "33", "32"]),
        (["tier.k=0"], ["tier.k", "0"]),
        (["tier.k=2.5"], ["tier.k", "2.5"]),
        (["+tier.kk=2"], ["tier", "kk"]),
        (["+optim.momentum=0.9"], ["optim", "momentum"]),
        (["+nonsense=1"], ["nonsense"]),
        (["~optim.lr"], ["optim", "lr", "missing"]),
        (["~optim"], ["optim", "missing"]),
        (["optim.steps=many"], ["optim.steps", "'many'", "int"]),
        (["optim.steps=1.5"], ["optim.steps", "1.5", "int"]),
        (["optim.steps=true"], ["optim.steps", "True", "int"]),
        (["optim.lr=fast"], ["optim.lr", "'fast'", "float"]),
        (["optim.lr=true"], ["optim.lr", "True", "float"]),
        (["resume=1"], ["resume", "1", "bool"]),
        (["root=null"], ["root"]),
        (["run_dir=null"], ["run_dir", "None", "str"]),
        (["optim=7"], ["optim", "7"]),
        (["optim.steps=0"], ["optim.steps", "0"]),
        (["optim.lr=0"], ["optim.lr"]),
        (["optim.lr=nan"], ["optim.lr"]),
        (["optim.weight_decay=-1"], ["optim.weight_decay"]),
        (["seed=-1"], ["seed"]),
        (["export.trace_tokens=0"], ["export.trace_tokens"]),
        (["export.trace_prompts=0"], ["export.trace_prompts"]),
        (["sample.top_p=0"], ["sample.top_p"]),
        (["sample.top_p=1.5"], ["sample.top_p"]),
        (["sample.temperature=-1"], ["sample.temperature"]),
        (["sample.backend=tgi"], ["sample.backend", "'tgi'", "transformers, vllm"]),
        (["sample.max_growth=0.5"], ["sample.max_growth", "0.5"]),
        (["sample.max_truncated=-0.1"], ["sample.max_truncated"]),
        (["optim.patience=-1"], ["optim.patience", "-1"]),
        (["base.gradient_checkpointing=1"], ["base.gradient_checkpointing", "bool"]),
        (["sample.temperature=nan"], ["sample.temperature"]),
        (["base.dtype=float16"], ["base.dtype", "'float16'", "float32, bfloat16"]),
        (["optim.schedule=linear"], ["optim.schedule", "'linear'", "cosine"]),
        (["heads.loss=mse"], ["heads.loss", "'mse'", "kl, bce"]),
        (["logger.wandb=yes"], ["logger.wandb"]),
        (["tier.owners.last=4"], ["tier.consumers", "6"]),
        (["tier.owners.first=-1"], ["tier.owners", "-1"]),
        (["tier.lora.targets=[mlp.gate]"], ["tier.lora.targets", "mlp.gate"]),
        (["tier.family=llama"], ["family", "'llama'"]),
        (["root=${nowhere}"], ["nowhere"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_a_wrong_setting_is_one_sentence_that_names_it(overrides, words):
    message = error_of(*overrides)
    assert all(word in message for word in words), message


# -- the command line --------------------------------------------------------------------------------------------------


def command(directory: Path, *arguments: str) -> tuple[int, str, list[str]]:
    """(exit code, stdout, lines of stderr)"""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "edge0_train", *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr.splitlines()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["phase=nope"], ["phase: 'nope' is unknown", *PHASE_NAMES, "all"]),
        (["tier=9b"], ["tier: '9b' is unknown", "35b", "nano"]),
        (["tier=35b", "phase=quantize"], ["base.source", "not set"]),
        (["optim.nope=3"], ["optim.nope"]),
        (["optim.lr"], ["optim.lr"]),
        (["phase=nope", "--multirun"], ["phase: 'nope' is unknown"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_command_line_errors_are_one_line_and_exit_code_2(
    tmp_path: Path, arguments: Sequence[str], words: Sequence[str]
):
    code, output, errors = command(tmp_path, *arguments)
    assert code == 2, errors
    assert len(errors) == 1 and errors[0].startswith("error: "), "\n".join(errors)
    assert all(word in errors[0] for word in words), errors[0]
    assert not output and not list(tmp_path.iterdir())
