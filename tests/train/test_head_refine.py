"""Both phases that train heads, called as they are: which routing they learn under, what goes in, what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge0_runtime.contract.artifacts import read_adapter
from edge0_runtime.contract.errors import Edge0Error
from edge0_train.measure import head_report
from edge0_train.objectives import heads as objective
from edge0_train.phases import phase_function
from edge0_train.run import open_run
from tests.train.conftest import Make

SMALL = ("optim.steps=2", "optim.rows=6", "optim.micro_rows=3", "optim.warmup=0", "logger.every=1")
FILE = "prerouter_edge0_nano.safetensors"


@pytest.fixture
def do(make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """phase, overrides -> its run directory and summary; two steps are enough for the gate against trivial baselines."""

    def run(phase: str, *overrides: str) -> tuple[Path, dict[str, Any]]:
        monkeypatch.setattr(head_report, "check_beats_baselines", lambda *_: None)
        config = make_config(phase, f"run_dir={tmp_path / phase}", *SMALL, *overrides)
        return tmp_path / phase, phase_function(phase)(config, open_run(config))

    return run


@pytest.mark.parametrize(("phase", "by_heads"), [("head_distill", False), ("head_refine", True)])
def test_which_routing_the_heads_learn_under(do, monkeypatch, phase, by_heads):
    """Distillation: every layer's own gate. Refinement: the very heads that train."""
    seen: list[tuple[bool, bool]] = []
    distill = objective.distill

    def watched(path: Any, heads: Any, routing: Any, *rest: Any) -> None:
        seen.append((routing.predicted_BT is not None, path.heads is heads))
        distill(path, heads, routing, *rest)

    monkeypatch.setattr(objective, "distill", watched)
    do(phase)
    assert seen == [(by_heads, by_heads)] * 4  # two steps of two micro-batches


def test_refinement_goes_on_from_the_heads_that_it_is_given(do, make_config):
    given = read_adapter(Path(make_config("head_refine").root) / "head_distill" / FILE, "prerouter")
    directory, summary = do("head_refine", "optim.lr=1e-3")
    refined = read_adapter(directory / FILE, "prerouter")
    for name, value in given.tensors.items():  # two steps of AdamW move a value by 2e-3 at most
        moved = np.abs(refined.tensors[name].astype(np.float32) - value.astype(np.float32))
        assert 0 < moved.max() <= 2.1e-3 + 1e-3 * np.abs(value).max(), name
    assert refined.provenance
    *before, last = refined.provenance.phases
    assert last.phase == "head_refine" and last.parents == {"prerouter": given.sha256} and before
    assert summary["recall"].keys() >= {"heads", "before", "uniform"} and summary["steps"] == 2


def test_distillation_takes_no_heads(do):
    """Whatever inputs.prerouter says: it starts at the next layer's router."""
    directory, _ = do("head_distill", "inputs.prerouter=/nowhere")
    written = read_adapter(directory / FILE, "prerouter").provenance
    assert written and written.phases[-1].parents == {} and len(written.phases) == 1


def test_refinement_without_heads_says_where_they_come_from(do):
    with pytest.raises(Edge0Error, match=r"inputs\.prerouter: empty; .*phase=head_distill"):
        do("head_refine", "inputs.prerouter=")
