"""The 35b at a tiny width: its own tier, 40 layers and 256 experts, from quantising to what is served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge0_runtime.contract.provenance import DataSource
from edge0_runtime.contract.traces import read_trace
from edge0_runtime.engine import Engine
from edge0_runtime.measure.verify import verify
from edge0_train.adapters import base_info, write_output
from edge0_train.cli import run_phase
from edge0_train.config import configure
from edge0_train.data.rows import TextRow, write_data
from edge0_train.synthetic import random_lora
from tests.random_adapters import random_heads
from tests.tiny_models import ARCHITECTURE_35B, tiny_qwen3_5_moe

CHUNK = 4
LENGTHS = (1, CHUNK + 1, CHUNK + 2)
"""Of prompts whose last pass is of one token: the whole prompt; the last token, which goes alone; and one more before it."""
TOKENS = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exported with random heads: hardly a prediction is what the layer's own gate would choose."""
    root = tmp_path_factory.mktemp("35b")
    source = tiny_qwen3_5_moe(root / "teacher", branch_gain=0.05, **ARCHITECTURE_35B)
    architecture = [f"tier.architecture.{name}={number}" for name, number in ARCHITECTURE_35B.items()]
    common = (
        "tier=35b", f"root={root}", *architecture, "tier.head_width=64", f"base.source={source}",
        f"teacher.directory={source}", "base.dtype=float32", "base.device=cpu", "threads=1", "logger.wandb=disabled",
        "text.max_length=64", f"export.trace_prompts={len(LENGTHS)}", f"export.trace_tokens={TOKENS}",
    )  # fmt: skip
    run_phase(configure("phase=quantize", *common))
    _write_text(root / "teacher_text")
    result, data = {"steps": 1, "tokens": 1}, DataSource("0" * 64, 1)
    heads, lora = (configure(f"phase={phase}", *common) for phase in ("head_distill", "student_sft"))
    for config in (heads, lora):
        Path(config.run_dir).mkdir()
    sha256 = write_output(heads, "prerouter", random_heads(heads.tier), base_info(heads), result, data, {})
    write_output(lora, "lora", random_lora(lora.tier, seed=0), base_info(lora), result, data, {}, sha256)
    run_phase(configure("phase=export", *common))
    return root / "model"


def _write_text(directory: Path) -> None:
    """Rows whose prompts the export traces: random ids of `LENGTHS`."""
    random = np.random.default_rng(0)
    prompts = [tuple(random.integers(3, ARCHITECTURE_35B["vocab_size"], length).tolist()) for length in LENGTHS]
    rows = [TextRow(prompt, (3, 4, 5), "length") for prompt in prompts]
    directory.mkdir()
    write_data(directory, rows, rows, {})


def test_tokens_and_experts_of_every_layer_and_step_are_the_torch_students(model: Path) -> None:
    """Own gates on the prompt, also in a pass of one token, and at the first decode step; then predictions for layers 7..38."""
    trace = read_trace(model / "verify_edge0_35b.safetensors")
    assert [prompt.prompt_ids_P.size for prompt in trace.prompts] == [*LENGTHS]
    assert {prompt.experts_TLK.shape for prompt in trace.prompts} == {(TOKENS, 40, 4)}
    with Engine.load(model) as engine:
        engine.prefill_chunk = CHUNK
        report = verify(engine, trace)
        assert engine.model.tier.consumers == tuple(range(7, 39)) and engine.model.tier.owners[-1] == 38
    assert report.ok and report.dropped == 0, report.problems()
    assert all(prompt.judged_rows > 2 for prompt in report.prompts), "a near-tie before the first prediction"
