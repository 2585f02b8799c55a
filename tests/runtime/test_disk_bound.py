"""benchmarks/disk_bound.py: what it measures, that it goes on where it stopped, and the arithmetic of its table."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import disk_bound
from benchmarks.disk_bound import Cell, over_on_demand, roofline_ms, table
from benchmarks.record import add_rows, read_rows

MIB = 2**20


def test_a_cell_is_measured_behind_the_disk_and_not_before(
    two_tiers: Path, budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds: list[float] = []  # of every read

    class Noted(disk_bound.SlowDisk):
        def slowed(self, read: Any, size: Any) -> Any:
            return super().slowed(lambda *args: (speeds.append(self.bytes_per_second), read(*args))[1], size)

    monkeypatch.setattr(os, "preadv", os.preadv)  # put back afterwards
    monkeypatch.setattr(disk_bound, "SlowDisk", Noted)
    monkeypatch.setitem(disk_bound.BUDGET_GIB, 2, budget(two_tiers / "disk-bound-k2", 9, tier_name=disk_bound.TIER))
    monkeypatch.setitem(disk_bound.TOKENS, 2, {"400": 4})
    rows = list(disk_bound.measure(Cell(2, "400", True, 3), two_tiers))
    assert [row["arm"] for row in rows] == ["on_demand", "prerouter+sticky", "prerouter+sticky", "on_demand"]
    assert all(Cell(2, "400", True, 3).has(row) and len(row["tokens"]) == 4 for row in rows)
    unmeasured = speeds.count(math.inf)  # the answer, then both arms
    assert speeds == [math.inf] * unmeasured + [400.0 * MIB] * (len(speeds) - unmeasured)
    assert 0 < unmeasured < len(speeds)


def test_what_is_recorded_is_not_run_again(
    two_tiers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["disk_bound", str(two_tiers), str(tmp_path / "out"), "--k", "2", "--disks", "400", "--plain"]
    monkeypatch.setattr(sys, "argv", command)
    disk_bound.main()
    rows = read_rows(tmp_path / "out/rows.jsonl")
    assert [row["arm"] for row in rows] == [*disk_bound.ARMS, *disk_bound.ARMS[::-1]]
    assert all(row["commit"] and row["machine"] and len(row["load"]) == 3 for row in rows)
    assert (tmp_path / "out/400/speed.png").read_bytes().startswith(b"\x89PNG")
    lines = (tmp_path / "out/table.md").read_text()
    assert lines in capsys.readouterr().out

    monkeypatch.setattr(disk_bound, "make_checkpoint", lambda *_: pytest.fail("a finished cell was run"))
    disk_bound.main()
    assert read_rows(tmp_path / "out/rows.jsonl") == rows


def test_a_cell_that_fails_leaves_no_rows(two_tiers: Path, tmp_path: Path) -> None:
    (two_tiers / "disk-bound-k4").mkdir()
    with pytest.raises(SystemExit, match="the same command goes on from here"):
        disk_bound.run(Cell(4, "400", False, 0), two_tiers, tmp_path)
    assert read_rows(tmp_path / "rows.jsonl") == []


def row(arm: str, half: int, speed: float, *, sticky: bool = False, disk: str = "200") -> dict[str, Any]:
    return {
        "arm": arm, "k": 4, "disk": disk, "sticky": sticky, "round": 0, "half": half, "prompt": 0,
        "decode_tokens_per_second": speed, "decode_step_ms_p50": 1e3 / speed, "decode_blocked_share": 0.25,
        "decode_expert_bytes_per_step": 0 if arm == "resident" else 40 * MIB, "decode_expert_loads_per_step": 20,
        "plan": {"disk_bytes_per_second": 800.0 * MIB},
    }  # fmt: skip


def test_ratios_are_taken_within_a_process() -> None:
    plain = [row("on_demand", 0, 1.0), row("prerouter", 0, 2.0), row("prerouter", 1, 1.5), row("on_demand", 1, 1.0)]
    sticky = [row("on_demand", 0, 2.0, sticky=True), row(disk_bound.STICKY, 0, 5.0, sticky=True)]
    assert over_on_demand([*plain, *sticky], "prerouter") == [1.5, 2.0]
    assert over_on_demand([*plain, *sticky], disk_bound.STICKY) == [2.5]


def test_the_roofline_is_the_longer_of_computing_and_reading() -> None:
    own, slow, fast = [row("prerouter", 0, 3.0)], [row("resident", 0, 2.0)], [row("resident", 0, 10.0)]
    assert roofline_ms(own, slow) == pytest.approx(500)
    assert roofline_ms(own, fast) == pytest.approx(200)  # 40 MiB at 200 MiB/s
    assert roofline_ms([row("prerouter", 0, 3.0, disk="real")], fast) == pytest.approx(100)  # 50 ms of reading
    assert math.isnan(roofline_ms(own, []))


def test_the_table_says_shares_of_oracle_and_roofline(tmp_path: Path) -> None:
    rows = [row("on_demand", 0, 1.0), row("oracle", 0, 2.5), row("prerouter", 0, 2.0), row("resident", 0, 4.0)]
    add_rows(tmp_path / "rows.jsonl", [*rows, row("on_demand", 0, 1.25, sticky=True)])
    add_rows(tmp_path / "rows.jsonl", [row(disk_bound.STICKY, 0, 3.125, sticky=True)])
    lines = table(read_rows(tmp_path / "rows.jsonl")).splitlines()
    assert [line.split(" | ")[2] for line in lines[2:]] == [
        "oracle", "prerouter", "prerouter+sticky", "resident", "on_demand",
    ]  # fmt: skip
    # 250 ms of computing (resident), 200 of reading: 4 tok/s at most
    assert lines[3] == "| 4 | 200 | prerouter | 2.00 | 2.00 (2.00 to 2.00) | 0.80 | 0.50 | 25.0 % | 40 | 20.0 |"
    assert lines[4].startswith("| 4 | 200 | prerouter+sticky | 3.12 | 2.50 (2.50 to 2.50) | 1.00 | 0.78 |")
    assert lines[6].startswith("| 4 | 200 | on_demand | 1.00 | 1.00 ")  # the plain one
    assert json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])["arm"] == "on_demand"
