"""`bench` as one block of plain text to paste into a report: machine, disk, settings, medians; no path, user or host in it."""

from __future__ import annotations

import platform
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edge0_runtime.contract.code_version import code_commit, tool_version
from edge0_runtime.contract.machine import cpu_count, cpu_name, memory_limit_bytes
from edge0_runtime.engine import Engine
from edge0_runtime.host.disk import disk_speed
from edge0_runtime.measure.bench import PageCache
from edge0_runtime.units import MISSING, figures, share, size

WIDTH = 100
PROBED_BYTES = 2**26
PAGES: dict[PageCache, str] = {
    "keep": "as it was",
    "run": "dropped before each run",
    "token": "dropped before each token",
}
FIGURES: tuple[tuple[str, str, Callable[[float | None], str]], ...] = (
    ("tokens/s", "decode_tokens_per_second", figures),
    ("ms a step", "decode_step_ms_p50", figures),
    ("ms waiting", "decode_blocked_ms_p50", figures),
    ("read a step", "decode_expert_bytes_per_step", size),
    ("hits", "decode_expert_hit_rate", share),
    ("MLX peak", "mlx_peak_bytes", size),
    ("process", "process_peak_rss_bytes", size),
)
"""(title, key of a row, how it is shown)."""


def share_block(engine: Engine, rows: Sequence[Mapping[str, Any]]) -> str:
    """What `rows`, of one or several arms, were measured on, and a line of medians for each arm."""
    commit, dirty = code_commit().partition("-")[::2]
    row = rows[0]
    facts = {
        "edge0": f"{tool_version()}, commit {commit[:12]}{' with changes' * bool(dirty)}",
        "machine": f"{cpu_name()}, {cpu_count()} CPUs, memory {size(memory_limit_bytes())}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}",
        "mlx": f"{row['versions']['mlx']}, mlx-lm {row['versions']['mlx-lm']}, device {row['device']}",
        "disk": f"{_disk(engine)}; page cache {PAGES[row['page_cache']]}",
        "model": _model(engine),
        "budget": _budget(rows),
        "runs": _runs(rows),
    }
    lines = [textwrap.fill(f"{name:<8} {text}", WIDTH, subsequent_indent=9 * " ") for name, text in facts.items()]
    return "\n".join([*lines, "", *_table(rows)])


def _disk(engine: Engine) -> str:
    store, threads = engine.model.store, engine.model.fixed.io_threads
    speed = disk_speed(store, threads=threads, max_bytes=PROBED_BYTES)
    reads = f"reads of an expert ({size(max(map(store.expert_nbytes, store.tensors)))}), {threads} threads"
    return f"{size(None if speed is None else speed.bytes_per_second)}/s by {reads}"


def _model(engine: Engine) -> str:
    model, tier = engine.model, engine.model.tier
    sticky = tier.router.sticky
    return (
        f"tier {tier.name}: K {tier.k} of {tier.num_experts} experts, {tier.num_layers} layers,"
        f" {0 if model.heads is None else len(tier.consumers)} predicted,"
        f" {f'sticky {sticky.bias:g},{sticky.window}' if sticky else 'not sticky'},"
        f" {'with' if model.lora_modules else 'without'} LoRA"
    )


def _budget(rows: Sequence[Mapping[str, Any]]) -> str:
    plan = next((row["plan"] for row in rows if row["plan"]), None)
    if plan is None:
        return "none: all experts are held"
    return f"{size(plan['budget_bytes'])}: {plan['slots']} of {plan['experts']} experts held"


def _runs(rows: Sequence[Mapping[str, Any]]) -> str:
    each = sum(row["arm"] == rows[0]["arm"] for row in rows)
    prompts, tokens = (_range([row[name] for row in rows], str) for name in ("prompt_tokens", "generated_tokens"))
    return f"{each} an arm; prompts of {prompts} tokens, {tokens} generated; medians, and (least..most)"


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    table = [["arm", *(title for title, _, _ in FIGURES)]]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        table.append([arm])
        for _, name, show in FIGURES:
            values = [row[name] for row in own if row[name] is not None]
            table[-1].append(show(statistics.median(values)) if values else MISSING)
        speeds = [row["decode_tokens_per_second"] for row in own if row["decode_tokens_per_second"] is not None]
        if speeds:
            table[-1][1] += f" ({_range(speeds, figures)})"
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]


def _range(values: Sequence[Any], show: Callable[[Any], str]) -> str:
    return "..".join(dict.fromkeys((show(min(values)), show(max(values)))))
