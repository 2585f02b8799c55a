"""`bench --share` is a block that may be shown to anybody."""

from __future__ import annotations

import getpass
import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from edge0_runtime.cli import main
from edge0_runtime.engine import Engine
from edge0_runtime.measure import share
from edge0_runtime.measure.share import WIDTH, share_block


def test_the_block_has_the_settings_and_names_no_place_and_nobody(
    tiny_dir: Path, budget: Callable[..., float], capsys: pytest.CaptureFixture[str]
) -> None:
    gib = str(budget(tiny_dir, 12))
    arguments = ["--arms", "prerouter,on_demand", "--rounds", "1", "--max-tokens", "3", "--prompt", "1+1"]
    assert main(["bench", str(tiny_dir), "--share", "--memory-budget", gib, *arguments]) == 0
    block = capsys.readouterr().out.rstrip("\n")
    lines = block.splitlines()
    assert len(lines) <= 25 and max(map(len, lines)) <= WIDTH
    for told in ("K 2 of 8 experts, 4 layers, 2 predicted, not sticky, with LoRA", "12 of 32 experts held", "13.5 KiB"):
        assert told in block
    assert [line.split()[0] for line in lines[-2:]] == ["prerouter", "on_demand"]
    for secret in (str(tiny_dir), tiny_dir.name + "/", str(Path.home()), platform.node(), getpass.getuser() + "@"):
        assert secret not in block


def test_what_is_long_goes_on_below(
    tiny_dir: Path, budget: Callable[..., float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share, "WIDTH", 40)
    gib = str(budget(tiny_dir, 12))
    assert (
        main(["bench", str(tiny_dir), "--share", "--memory-budget", gib, "--max-tokens", "2", "--prompt", "1+1"]) == 0
    )
    facts = capsys.readouterr().out.partition("\n\n")[0]
    assert max(map(len, facts.splitlines())) <= 40
    for told in ("2 predicted, not sticky, with LoRA", "page cache as it was", "medians, and (least..most)"):
        assert told in " ".join(facts.split())


def test_an_arm_is_shown_by_its_medians(tiny_dir: Path, budget: Callable[..., float]) -> None:
    figures = {
        "decode_step_ms_p50": 8.0, "decode_blocked_ms_p50": None, "decode_expert_bytes_per_step": 2048.0,
        "decode_expert_hit_rate": 0.5, "mlx_peak_bytes": 2**20, "process_peak_rss_bytes": 2**21,
    }  # fmt: skip
    made = {"versions": {"mlx": "1", "mlx-lm": "2"}, "device": "cpu", "page_cache": "keep", "plan": None}
    rows = [
        made
        | figures
        | {"arm": "prerouter", "prompt_tokens": 5, "generated_tokens": 9, "decode_tokens_per_second": speed}
        for speed in (1.0, 3.0, 7.0)
    ]
    with Engine.load(tiny_dir, memory_budget=budget(tiny_dir, 12)) as engine:
        *_, runs, _, _, line = share_block(engine, rows).splitlines()
    assert runs == "runs     3 an arm; prompts of 5 tokens, 9 generated; medians, and (least..most)"
    assert line.split() == [
        "prerouter",
        "3.00",
        "(1.00..7.00)",
        "8.00",
        "-",
        "2.00",
        "KiB",
        "50",
        "%",
        "1.00",
        "MiB",
        "2.00",
        "MiB",
    ]
