"""The whole way on the 8b's small twin and its embedded teacher: heads learn, and what is served is what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from edge0_runtime.contract.artifacts import read_adapter
from edge0_runtime.contract.tier import builtin_tier
from edge0_runtime.contract.traces import read_trace
from edge0_runtime.engine import Engine
from edge0_runtime.measure.verify import verify
from edge0_train.cli import run_phase
from edge0_train.config import config_directory, read_config
from edge0_train.measure.recall import BASELINES
from tests.e2e.conftest import SMALL, STEPS, phase_settings

TIER = builtin_tier("nano-ling")


def run(root: Path, phase: str, *settings: str) -> Any:
    """One phase in this process: what its done.json says."""
    with initialize_config_dir(str(config_directory()), version_base=None):
        return run_phase(
            read_config(compose("train", [f"phase={phase}", f"tier={TIER.name}", f"root={root}", *settings]))
        )


def test_export_serves_exactly_as_trained(tmp_path: Path) -> None:
    assert run(tmp_path, "quantize", *SMALL)["int8_modules"] == 0
    run(tmp_path, "teacher_text", *SMALL)
    for phase in STEPS:
        small = () if phase == "on_policy" else ("optim.rows=12", "logger.checkpoint_every=100")
        run(tmp_path, phase, *phase_settings(phase), *small)
    recall = json.loads((tmp_path / "head_distill/done.json").read_text())["recall"]
    assert recall["heads"] > max(recall["before"], *(recall[name] for name in BASELINES))
    run(tmp_path, "evaluate", *SMALL, "sample.eval_prompts=16")
    run(tmp_path, "export", *SMALL, "export.trace_prompts=2", "export.trace_tokens=48")

    table = json.loads((tmp_path / "evaluate/done.json").read_text())["table"]
    rows = {row["stage"]: row for row in table}
    assert len(rows) == len(table), "a stage is measured twice"
    assert rows["untrained heads"]["kl"] > rows["heads only"]["kl"] > rows["+ SFT"]["kl"]
    lora = read_adapter(tmp_path / "model/lora_edge0_nano-ling.safetensors", "lora")
    assert lora.tensors["model.layers.3.attention.kv_b_proj.lora_B"].any()
    trace = read_trace(tmp_path / "model/verify_edge0_nano-ling.safetensors", TIER)
    with Engine.load(tmp_path / "model") as engine:
        report = verify(engine, trace)
        assert engine.model.lora_modules == len(TIER.lora_modules())
    assert report.ok, report.problems()
    assert [prompt.judged_rows for prompt in report.prompts] == [48, 48]
