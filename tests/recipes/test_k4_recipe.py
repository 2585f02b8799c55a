"""recipes/k4_from_k8: every arm's settings compose, phases run in order and once, and the table says what was measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge0_train.config import Config
from recipes import runs
from recipes.k4_from_k8 import run as recipe


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Config]:
    """The configurations of all phases that ran; none does anything but say that it is done."""
    configs: list[Config] = []

    def run_phase(config: Config) -> None:
        configs.append(config)
        stages = [{"stage": f"int4, K={config.tier.k}", "kl": 0.2}, {"stage": "+ SFT", "kl": 0.1, "recall": 0.5}]
        Path(config.run_dir).mkdir(parents=True)
        (Path(config.run_dir) / "done.json").write_text(json.dumps({"table": stages}))

    def bench(command: list[str], **_: Any) -> SimpleNamespace:
        return SimpleNamespace(stdout="\n".join(json.dumps({"decode_tokens_per_second": n}) for n in (1, 2, 30)))

    monkeypatch.setattr(runs, "run_phase", run_phase)
    monkeypatch.setattr(recipe.subprocess, "run", bench)
    monkeypatch.setattr(sys, "argv", ["x", "--arms", "8", "4/16", "--rows", "8", "--out", str(tmp_path)])
    return configs


def test_arms_share_base_and_text_and_have_their_own_tier(ran, tmp_path, capsys):
    recipe.main()
    assert [c.phase for c in ran] == [*recipe.SHARED, *recipe.PHASES, *recipe.PHASES]
    assert {c.base.directory for c in ran} == {str(tmp_path / "base")}
    assert {c.text.rows for c in ran} == {str(tmp_path / "teacher_text")}
    assert [(c.tier.k, c.tier.router.mass_k) for c in ran[2:]] == [(8, 0)] * 4 + [(4, 16)] * 4
    assert {c.root for c in ran} == {str(tmp_path / name) for name in ("", "k8", "k4-mass16")}
    rows = [json.loads(line) for line in (tmp_path / "table.jsonl").read_text().splitlines()]
    assert rows[1] == {
        "arm": "k4-mass16", "k": 4, "mass_k": 16, "kl own gates": 0.2, "kl trained": 0.1, "exact_match own gates": None,
        "exact_match trained": None, "recall": 0.5, "decode_tokens_per_second": 2,
    }  # fmt: skip
    assert (tmp_path / "table.txt").read_text().strip() in capsys.readouterr().out
    recipe.main()
    assert len(ran) == 10, "what is done is not done again"


def test_settings_are_every_runs(ran, monkeypatch):
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--set", "tier.consumers.last=7", "optim.lr=1e-4"])
    recipe.main()
    assert {(c.tier.consumers[-1], c.optim.lr) for c in ran} == {(7, 1e-4)}
