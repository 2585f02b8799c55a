"""What doctor says, for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from edge0_runtime.measure.advice import gib_at_least
from edge0_runtime.units import MISSING, figures, share, size

COLUMNS = ("budget", "experts", "held already", "loads a token", "bytes a token", "tokens/s", "bound by")


def doctor_text(data: Mapping[str, Any]) -> str:
    """`doctor`'s data as lines."""
    ranges = len(data["expert_ranges"])
    lines = [
        f"{data['platform']}, Python {data['python']}, {data['cpus']} CPUs, device {data['device']}",
        ", ".join(f"{name} {number}" for name, number in data["versions"].items()),
        f"tier {data['tier']} ({data['model']}), K {data['k']}: base {size(data['base_bytes'])},"
        f" {data['experts']} experts of {size(data['expert_bytes'])} in {ranges} ranges;"
        f" {size(data['step_bytes'])} a token if nothing repeats",
        _where(data),
        *_disk(data),
        _computing(data),
        f"memory {size(data['memory_bytes'])}; the smallest budget that works is {size(data['smallest_budget_bytes'])}"
        f" (--memory-budget {gib_at_least(data['smallest_budget_bytes'], 3)})",
    ]
    if data["budget"] is None:
        return "\n".join([*lines, "it won't run: there is less memory than that"])
    return "\n".join(
        [*lines, "", *_budgets(data), "", *_locality(data), _context(data["budget"]), *_advice(data["advice"])]
    )


def _where(data: Mapping[str, Any]) -> str:
    if data["source"] != "directory":
        return "only names and shapes were looked at, nothing was downloaded"
    cached = size(data["page_cache_bytes"])
    return f"files {size(data['expert_file_bytes'])}, {cached} of them in the page cache"


def _disk(data: Mapping[str, Any]) -> Iterator[str]:
    if data["disk_bytes_per_second"] is None:
        yield "disk: this file system has no reads past the page cache; not measured, give its speed with --disk-mib-s"
    elif not data["disk"]:
        yield f"disk, as given: {size(data['disk_bytes_per_second'])}/s"
    for speed in data["disk"]:
        floor = 1e3 * data["step_bytes"] / speed["bytes_per_second"]
        yield (
            f"disk, {speed['threads']} thread{'s' * (speed['threads'] > 1)}: {size(speed['bytes_per_second'])}/s,"
            f" {figures(speed['ms_per_expert'], ' ms')} an expert, {figures(floor, ' ms')} a token"
        )


def _computing(data: Mapping[str, Any]) -> str:
    found = figures(1e3 * data["step_compute_seconds"], " ms")
    busy = (
        f"; the machine is busy (load {figures(data['load_average'])}), so that is too long: ask again when it is quiet"
    )
    said = f"computing, measured here on layers of these shapes: {found} a token"
    return said + busy if data["load_average"] > data["cpus"] else said


def _budgets(data: Mapping[str, Any]) -> Iterator[str]:
    table = [list(COLUMNS)]
    for row in data["budgets"]:
        cells = [
            _band(row["hit_share"], share),
            _band(row["loads_per_token"][::-1], figures),
            _band(row["bytes_per_token"][::-1], size),
            _band(row["tokens_per_second"], figures),
        ]
        asked = ", as asked" * (row["experts_held"] == data["budget"]["experts_held"])
        table.append([size(row["budget_bytes"]), str(row["experts_held"]), *cells, (row["bound"] or MISSING) + asked])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        yield "  ".join(cell.rjust(width) for cell, width in zip(line[:-1], widths[:-1], strict=True)) + "  " + line[-1]


def _locality(data: Mapping[str, Any]) -> Iterator[str]:
    record = data["locality"]
    bias, window = record["sticky"]["bias"], record["sticky"]["window"]
    how = f"sticky routing of bias {bias:g} and window {window}" if window else "routing that isn't sticky"
    yield (
        "held already: of a token's experts, those still in memory from earlier tokens; from what chance gives to what was"
        f" recorded on {record['tier']} (K {record['k']}, {how})"
    )
    yield "tokens/s: from reading and computing one after the other, to both at once"


def _context(budget: Mapping[str, Any]) -> str:
    """What a conversation's length costs of the budget that was asked about."""
    return (
        f"context: {budget['context']:,} tokens are reserved; each 1,000 more take the room of"
        f" {figures(budget['experts_per_1000_tokens'])} experts; {_longest(budget)}"
    )


def _longest(budget: Mapping[str, Any]) -> str:
    needed = f"the {budget['step_experts']} experts that a token needs"
    longest: int = budget["most_context"]
    return f"up to {longest:,} leave room for {needed}" if longest else f"{needed} don't fit beside any"


def _advice(advice: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for one in advice:
        yield f"faster: {one['change']}, {_band(one['tokens_per_second'], figures)} tokens/s: {one['command']}"


def _band(ends: Sequence[float] | None, show: Callable[[float], str]) -> str:
    return MISSING if ends is None else " to ".join(dict.fromkeys(map(show, ends)))
