"""Rows of JSON lines that say on what they were measured, in a file to which a restarted run adds what is missing."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from edge0_runtime.contract.code_version import code_commit
from edge0_runtime.contract.machine import cpu_count, cpu_name

ROOT = Path(__file__).parents[1]
Row = dict[str, Any]


def circumstances() -> Row:
    """Of a run that is about to begin: commit, machine, and the load averages before it (1, 5, 15 minutes)."""
    return {"commit": code_commit(), "machine": machine(), "load": os.getloadavg()}


def machine() -> str:
    """Processor, cores and system."""
    return f"{cpu_name()}, {cpu_count()} cores, {platform.system()}"


def read_rows(path: Path) -> list[Row]:
    """All rows; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def add_rows(path: Path, rows: Iterable[Row]) -> None:
    """Append them in one write, so that a run that was stopped left all of its rows or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with path.open("a") as file:
        file.write(text)
