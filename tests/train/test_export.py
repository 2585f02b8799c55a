"""phase=export: what the reference traces are made of."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.provenance import DataSource
from edge0_runtime.contract.traces import PromptTrace, read_trace
from edge0_train.adapters import base_info, input_path, read_input, write_output
from edge0_train.cli import run_phase
from edge0_train.config import Config
from tests.random_adapters import random_lora
from tests.train.conftest import Make


def with_lora(make_config: Make, directory: Path) -> str:
    """A run directory with a random LoRA for the heads that `make_config` has."""
    config: Config = make_config("student_sft", f"run_dir={directory}")
    heads = read_input(config, "prerouter", input_path(config, "prerouter"))
    assert heads is not None
    directory.mkdir()
    data, result = DataSource("0" * 64, 1), {"steps": 1, "tokens": 1}
    tensors = {key: value * np.float16(0.1) for key, value in random_lora(config.tier).items()}
    write_output(config, "lora", tensors, base_info(config), result, data, {"prerouter": heads}, heads.sha256)
    return str(directory)


def test_references_are_float32_whatever_training_computed_in(make_config: Make, tmp_path: Path) -> None:
    """The second export goes into the first one's directory, with another run_dir, as `verify` advises."""
    lora, traces = with_lora(make_config, tmp_path / "sft"), []
    for name in ("float32", "bfloat16"):
        run_phase(
            make_config(
                "export", f"base.dtype={name}", f"inputs.lora={lora}", f"export.directory={tmp_path / 'model'}",
                f"run_dir={tmp_path / name}", "export.trace_prompts=2", "export.trace_tokens=6",
            )
        )  # fmt: skip
        (file,) = (tmp_path / "model").glob("verify_*")
        traces.append(read_trace(file))
        file.unlink()
    one, other = traces
    assert one.compute_dtype == other.compute_dtype == "float32"
    for a, b in zip(one.prompts, other.prompts, strict=True):
        for field in dataclasses.fields(PromptTrace):
            if field.name != "own_TOK":  # nano's heads see what ran
                np.testing.assert_allclose(getattr(b, field.name), getattr(a, field.name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "says"), [("tokenizer.json", "tokenizer.json"), ("chat_template.jinja", "chat template")]
)
def test_an_export_into_a_directory_with_another_template_or_tokenizer_is_refused(make_config, tmp_path, name, says):
    words = (f"inputs.lora={with_lora(make_config, tmp_path / 'sft')}", f"export.directory={tmp_path / 'model'}")
    words += ("export.trace_prompts=1", "export.trace_tokens=2")
    run_phase(make_config("export", *words, f"run_dir={tmp_path / 'one'}"))
    file = tmp_path / "model" / name
    text = file.read_text()
    file.unlink()  # it is a hard link
    file.write_text(text + " ")
    with pytest.raises(Edge0Error, match=f"{says} is not that of"):
        run_phase(make_config("export", *words, f"run_dir={tmp_path / 'two'}"))
    file.write_text(text)
    run_phase(make_config("export", *words, f"run_dir={tmp_path / 'two'}"))
