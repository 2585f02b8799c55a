"""A base whose config.json was edited after the heads were trained on it: no phase goes on with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from edge0_runtime.contract.artifacts import read_adapter
from edge0_runtime.contract.errors import Edge0Error
from edge0_train.adapters import input_path, read_input
from edge0_train.build import build_student, input_identity
from edge0_train.config import Config
from edge0_train.config.fields import all_settings
from edge0_train.phases.export import export
from edge0_train.run import open_run
from tests.random_adapters import write_adapters
from tests.train.conftest import Make


@pytest.fixture
def edited(make_config: Make, tmp_path: Path) -> Config:
    """student_sft on a copy of the base with ten times the rope_theta."""
    original = Path(make_config("student_sft").base.directory)
    base = tmp_path / "base"
    shutil.copytree(original, base)
    config = json.loads((base / "config.json").read_text())
    config["text_config"]["rope_parameters"]["rope_theta"] *= 10
    (base / "config.json").write_text(json.dumps(config))
    return make_config("student_sft", f"base.directory={base}", f"run_dir={tmp_path / 'run'}")


def heads_of(config: Config) -> str:
    return input_path(config, "prerouter")


def test_training_on_refuses_it_by_name_and_offers_no_flag_that_it_lacks(edited):
    with pytest.raises(Edge0Error) as error:
        build_student(edited, prerouter=heads_of(edited), new_lora=True)
    assert "rope_parameters.rope_theta was 10000.0 in its config.json and is 100000.0" in str(error.value)
    assert "--allow-mismatch" not in str(error.value)
    for setting in ("base.directory", "inputs.prerouter", "inputs.lora"):
        assert setting in str(error.value) and setting in all_settings()


def test_a_resumed_run_names_it(make_config, edited):
    same = make_config("student_sft", f"run_dir={edited.run_dir}")
    run = open_run(same)
    run.record_inputs(input_identity(same))
    run.log(1, {"loss": 1.0})  # a directory in which nothing has happened would begin anew
    with pytest.raises(Edge0Error, match=r"base\.config\.rope_parameters\.rope_theta: was 10000\.0, is 100000\.0"):
        open_run(make_config("student_sft", f"run_dir={edited.run_dir}", "resume=true")).record_inputs(
            input_identity(edited)
        )


def test_adapters_record_the_config_of_their_base(make_config):
    config = make_config("student_sft")
    provenance = read_adapter(heads_of(config), "prerouter").provenance
    assert provenance and provenance.base_config
    assert provenance.base_config["rope_parameters.rope_theta"] == 10000.0
    assert provenance.base_config["quantization.bits"] == 4


# -- the tier that a file was trained for


def test_heads_serve_any_layout_of_the_lora(make_config):
    """tier.lora.r=8 over heads that were trained beside r=16: heads do not depend on it."""
    config = make_config("student_sft", "tier.lora.r=8", "tier.lora.alpha=16")
    student = build_student(config, prerouter=heads_of(config), new_lora=True)
    assert student.prerouter and student.prerouter.tier.lora.r == 16


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("tier.k=8",), "tier.k is 4 there and 8 here"),
        (("tier.head_width=64", "tier.feature_topk=teacher"), "tier.head_width is 128 there and 64 here"),
    ],
)
def test_a_refusal_lists_the_fields_that_differ_and_its_advice_works(make_config, overrides, says):
    file = heads_of(make_config("student_sft"))
    with pytest.raises(Edge0Error) as error:
        read_input(make_config("student_sft", *overrides), "prerouter", file)
    assert says in str(error.value) and str(error.value).count("there and") == len(overrides)
    assert "lora.r" not in str(error.value) and "nano" not in str(error.value).replace(file, "")
    advised = [part.split(" is ") for part in str(error.value).split(": ")[2].partition(";")[0].split(", ")]
    values: list[Any] = [f"{name}={value.split(' ')[0]}" for name, value in advised]
    assert read_input(make_config("student_sft", *overrides, *values), "prerouter", file)


def test_a_lora_depends_on_its_own_layout(make_config, tmp_path):
    config = make_config("student_sft")
    lora = write_lora(config, tmp_path)
    with pytest.raises(Edge0Error, match=r"tier\.lora\.r is 16 there and 8 here"):
        read_input(make_config("student_sft", "tier.lora.r=8"), "lora", lora)


def write_lora(config: Config, directory: Path) -> str:
    """A random one of the configuration's tier, bound to its base."""
    shutil.copytree(config.base.directory, directory / "model")
    write_adapters(directory / "model", config.tier)
    return str(directory / "model" / config.tier.file_name("lora"))


def test_an_export_beside_an_edited_config_changes_nothing(make_config, edited, tmp_path):
    """Adapters in a model directory are not replaced when its base computes something else."""
    target = tmp_path / "model"
    shutil.copytree(edited.base.directory, target)
    lora = write_lora(make_config("export"), tmp_path / "lora")
    overrides = (f"export.directory={target}", f"inputs.lora={lora}", "export.trace_prompts=1", "export.trace_tokens=2")
    heads = Path(lora).parent / "prerouter_edge0_nano.safetensors"
    config = make_config("export", *overrides, f"inputs.prerouter={heads}", f"run_dir={tmp_path / 'export'}")
    before = sorted(path.name for path in target.iterdir())
    with pytest.raises(Edge0Error, match=r"export\.directory: .*\n.*rope_theta was 10000\.0 .* and is 100000\.0"):
        export(config, open_run(config))
    assert sorted(path.name for path in target.iterdir()) == before


def test_an_export_says_what_the_public_runtime_would_do_with_base_and_adapters(make_config, tmp_path, capsys):
    lora = write_lora(make_config("export"), tmp_path)
    heads = Path(lora).parent / "prerouter_edge0_nano.safetensors"
    overrides = (f"export.directory={tmp_path / 'out'}", f"inputs.lora={lora}", f"inputs.prerouter={heads}")
    config = make_config(
        "export", *overrides, f"run_dir={tmp_path / 'run'}", "export.trace_prompts=1", "export.trace_tokens=2"
    )
    said = export(config, open_run(config))["upstream"]
    assert any("tie_word_embeddings" in reason for reason in said["base"])
    assert all(any("it opens" in reason for reason in said[kind]) for kind in ("prerouter", "lora"))
    printed = capsys.readouterr().out
    assert all(f"  {part}: not loadable upstream: " in printed for part in ("base", "prerouter", "lora"))
