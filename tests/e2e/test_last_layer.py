"""Nano's older shape, in which the last layer is predicted too, stays a setting away: from heads to what is served."""

from __future__ import annotations

from pathlib import Path

from edge0_runtime.contract.traces import read_trace
from edge0_runtime.engine import Engine
from edge0_runtime.measure.verify import verify
from tests.e2e.conftest import ChainTo, Cli, phase_settings

TO_THE_END = "tier.consumers.last=7"


def test_a_tier_that_predicts_its_last_layer_is_trained_and_served(
    chain_to: ChainTo, train: Cli, tmp_path: Path
) -> None:
    """A chain on the same base and text, whose heads no tier of the other shape takes."""
    where, model = (f"root={chain_to('teacher_text')}", TO_THE_END), tmp_path / "model"
    heads, lora = (f"inputs.{kind}={tmp_path / kind}" for kind in ("prerouter", "lora"))
    distilled = train(
        "phase=head_distill", *where, f"run_dir={tmp_path / 'prerouter'}", *phase_settings("head_distill")
    )
    assert "layers 2..7 predicted" in distilled.stdout
    sft = (
        "phase=student_sft",
        heads,
        f"run_dir={tmp_path / 'lora'}",
        *phase_settings("student_sft"),
        "heads.joint_lr=0",
    )
    other = train(where[0], *sft, check=False)
    assert other.returncode and "inputs.prerouter" in other.stderr and not (tmp_path / "lora").exists()
    train(*where, *sft, "optim.steps=2")
    train("phase=export", *where, heads, lora, f"export.directory={model}", f"run_dir={tmp_path / 'export'}",
          "logger.wandb=disabled", "export.trace_prompts=2", "export.trace_tokens=24")  # fmt: skip
    with Engine.load(model) as engine:
        assert engine.model.tier.consumers == (2, 3, 4, 5, 6, 7)
        report = verify(engine, read_trace(model / "verify_edge0_nano.safetensors"))
    assert report.ok, report.problems()
