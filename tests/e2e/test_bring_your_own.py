"""Any supported family from a transformers directory to a verified model: inspect, quantize, three phases, export, verify."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

from edge0_runtime.contract.artifacts import read_adapter
from edge0_runtime.contract.tier import Tier
from edge0_runtime.contract.traces import read_trace
from edge0_runtime.engine import Engine
from edge0_runtime.measure.verify import verify
from edge0_train.cli import run_phase
from edge0_train.config import config_directory, read_config
from edge0_train.data.rows import write_data
from edge0_train.propose import inspect_command
from recipes.bring_your_own_moe.tiny import FLAT, tiny_flat
from tests.train.conftest import task_rows

STEPS = {"head_distill": 60, "student_sft": 3, "on_policy": 2}
SMALL = (
    "logger.wandb=disabled", "threads=1", "base.dtype=float32", "base.device=cpu", "text.prompts=tasks", "text.max_length=64",
    "optim.rows=8", "optim.micro_rows=8", "optim.lr=3e-3", "on_policy.rounds=1", "on_policy.top_k=32", "sample.prompts=16",
    "sample.max_new_tokens=8", "sample.max_truncated=1", "sample.max_repetitive=1", "sample.max_growth=100",
    "export.trace_prompts=2", "export.trace_tokens=24",
)  # fmt: skip


@pytest.mark.parametrize("family", FLAT)
def test_a_family_from_inspect_to_verify(family: str, tmp_path: Path) -> None:
    source, root, mine = tiny_flat(tmp_path / family, family), tmp_path / "root", tmp_path / "mine"
    inspect_command(["phase=inspect", f"base={source}", f"out={mine}", "name=own"])
    tier = Tier.from_dict(yaml.safe_load((mine / "tier/own.yaml").read_text()))
    assert (tier.family, tier.k, tier.base_k) == (family, 2, 4)
    with initialize_config_dir(str(config_directory()), version_base=None):
        (root / "teacher_text").mkdir(parents=True)
        write_data(root / "teacher_text", task_rows("train", 48), task_rows("eval", 12), {})
        for phase in ("quantize", *STEPS, "export"):
            steps = [f"optim.steps={STEPS[phase]}"] if phase in STEPS else []
            where = [f"hydra.searchpath=[file://{mine}]", "tier=own", f"root={root}", f"teacher.directory={source}"]
            where += ["tier.token_aware=true"]  # without words that mean anything, little else foretells a routing
            run_phase(read_config(compose("train", [f"phase={phase}", *where, *SMALL, *steps])))
    heads, lora = (read_adapter(root / "model" / tier.file_name(kind), kind) for kind in ("prerouter", "lora"))
    tier = dataclasses.replace(tier, token_aware=True)
    assert heads.tier == lora.tier == tier and heads.provenance
    recall = json.loads((root / "head_distill/done.json").read_text())["recall"]
    assert recall["heads"] > max(value for name, value in recall.items() if name not in ("heads", "before"))
    with Engine.load(root / "model") as engine:
        report = verify(engine, read_trace(root / "model" / tier.file_name("verify"), tier))
        assert engine.model.lora_modules == len(tier.lora_modules())
    assert report.ok and report.dropped == 0, report.problems()
