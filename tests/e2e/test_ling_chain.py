"""The whole way on the 8b's small twin, over a random teacher: nothing is learnt, but what is served is what was trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir

from edge0_runtime.contract.artifacts import read_adapter
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.provenance import DataSource
from edge0_runtime.contract.tier import builtin_tier
from edge0_runtime.contract.traces import read_trace
from edge0_runtime.engine import Engine
from edge0_runtime.measure.verify import verify
from edge0_train.adapters import base_info, write_output
from edge0_train.base import load_base
from edge0_train.cli import run_phase
from edge0_train.config import config_directory, read_config
from edge0_train.student import PrerouterHeads, StudentPath
from tests.tiny_ling import tiny_ling

TIER = builtin_tier("nano-ling")
SETTINGS = (
    "tier=nano-ling", "threads=1", "base.dtype=float32", "base.device=cpu", "text.prompts=tasks", "text.max_length=64",
    "sample.prompts=24", "sample.eval_prompts=6", "sample.batch=24", "sample.max_new_tokens=8", "sample.max_truncated=1",
    "optim.steps=2", "optim.rows=8", "optim.micro_rows=4", "optim.warmup=0", "logger.wandb=disabled", "logger.every=1",
    "on_policy.rounds=1", "on_policy.top_k=16", "export.trace_prompts=2", "export.trace_tokens=12",
)  # fmt: skip
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random teacher of the tier."""
    root, router = tmp_path_factory.mktemp("nano-ling"), TIER.router
    tiny_ling(
        root / "teacher", dtype="float32", **TIER.architecture, n_group=router.n_group, topk_group=router.topk_group,
        routed_scaling_factor=router.scaling,
    )  # fmt: skip
    return root


@pytest.fixture(scope="module")
def run(root: Path) -> Run:
    """run(phase): in-process, below the root."""

    def do(phase: str) -> Any:
        with initialize_config_dir(str(config_directory()), version_base=None):
            return run_phase(compose("train", _overrides(root, phase)))

    return do


def _overrides(root: Path, phase: str) -> list[str]:
    return [f"phase={phase}", f"root={root}", f"teacher.directory={root / 'teacher'}", *SETTINGS]


def _write_warm_heads(root: Path) -> None:
    """What head_distill would write, had the text of a random teacher anything to learn."""
    with initialize_config_dir(str(config_directory()), version_base=None):
        config = read_config(compose("train", _overrides(root, "head_distill")))
    heads, path = PrerouterHeads(TIER), StudentPath(load_base(config.base.directory, TIER)[0], TIER)
    heads.warm_start(lambda layer: path.router(layer).weight)
    for head in heads.layers.values():
        torch.nn.init.normal_(head.fc2.weight, std=0.1)
    Path(config.run_dir).mkdir(exist_ok=True)  # the refused run left its own
    result = {"steps": 1, "tokens": 1}
    write_output(config, "prerouter", heads.tensors(), base_info(config), result, DataSource("0" * 64, 1), {})


def test_export_serves_exactly_as_trained(root: Path, run: Run) -> None:
    assert run("quantize")["int8_modules"] == 0
    run("teacher_text")
    with pytest.raises(Edge0Error, match="does not beat the trivial baseline"):
        run("head_distill")
    _write_warm_heads(root)
    for phase in ("student_sft", "on_policy", "evaluate", "export"):
        run(phase)

    stages = {row["stage"]: row for row in json.loads((root / "evaluate/done.json").read_text())["table"]}
    assert {"teacher, K=8", "heads only", "+ SFT", "+ on-policy"} <= stages.keys()
    lora = read_adapter(root / "model/lora_edge0_nano-ling.safetensors", "lora")
    assert lora.tensors["model.layers.3.attention.kv_b_proj.lora_B"].any()
    trace = read_trace(root / "model/verify_edge0_nano-ling.safetensors", TIER)
    with Engine.load(root / "model") as engine:
        report = verify(engine, trace)
        assert engine.model.lora_modules == len(TIER.lora_modules())
    assert report.ok, report.problems()
    assert all(prompt.judged_rows == 12 for prompt in report.prompts)
