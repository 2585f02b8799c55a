"""How fast one engine is, and where a step's time and bytes go; one row of JSON values for each run.

A run is greedy, or replays a known continuation, so that arms can be compared on the same tokens. Prefill and decode
are apart; times are the caller's, from one token to the next.
"""

from __future__ import annotations

import itertools
import math
import platform
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import mlx.core as mx
import numpy as np

from edge0_runtime.engine import Engine
from edge0_runtime.host.memory import (
    drop_page_cache,
    page_cache_bytes,
    peak_rss_bytes,
    process_io,
    reset_peak_rss,
)
from edge0_runtime.units import figures, share, size

COUNTERS = (
    "expert_loads", "expert_bytes", "expert_hits", "expert_misses", "expert_late_misses", "blocked_load_seconds",
)  # fmt: skip
# What is done to the page cache: nothing; experts' files dropped before each run, or before each token.
PageCache = Literal["keep", "run", "token"]
PAGE_CACHE: tuple[PageCache, ...] = get_args(PageCache)

Sample = tuple[float, dict[str, Any]]


def bench(engine: Engine, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> Iterator[dict[str, Any]]:
    """Greedy runs of `max_tokens` tokens each, end tokens ignored; a row for each prompt."""
    for prompt_ids in prompts:
        yield environment(engine) | run(engine, prompt_ids, max_tokens=max_tokens)


def run(
    engine: Engine,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int,
    continuation: Sequence[int] | None = None,
    page_cache: PageCache = "keep",
) -> dict[str, Any]:
    """One run: rates, waits, traffic, memories.

    Args:
        max_tokens: of a greedy run. continuation: replayed instead.
        page_cache: what is done to the experts' pages; it takes place outside the measured time.
    """
    files = expert_files(engine)
    if page_cache != "keep":
        drop_page_cache(files)
    cached_before = page_cache_bytes(files)
    mx.reset_peak_memory()
    reset_peak_rss()
    io_before = process_io()
    if continuation is None:
        steps = engine.generate(prompt_ids, max_tokens=max_tokens, ignore_eos=True, trace=True)
    else:
        steps = engine.replay(prompt_ids, continuation)
    spent = 0.0  # on the page cache
    began = time.perf_counter()
    samples: list[Sample] = [(0.0, engine.stats())]
    tokens, chosen, experts = [], [], []
    io_first = io_before
    for step in steps:
        samples.append((time.perf_counter() - began - spent, engine.stats()))
        assert step.experts is not None and step.logits is not None
        if step.index == 0:
            io_first = process_io()
        tokens.append(step.token)
        chosen.append(int(step.logits.argmax()))
        experts.append(step.experts)
        if page_cache == "token":
            pausing = time.perf_counter()
            drop_page_cache(files)
            spent += time.perf_counter() - pausing
    io_after = process_io()
    decode_device = None if io_after is None or io_first is None else io_after.device - io_first.device
    return _rates(len(prompt_ids), samples, decode_device) | {
        "prompt_ids": list(prompt_ids),
        "tokens": tokens,
        "greedy": chosen,
        "expert_overlap": _overlap(experts[1:]),
        "page_cache": page_cache,
        "page_cache_bytes_before": cached_before,
        "page_cache_bytes_after": page_cache_bytes(files),
        "mlx_peak_bytes": mx.get_peak_memory(),
        "process_peak_rss_bytes": peak_rss_bytes(),
        "process_requested_bytes": None
        if io_after is None or io_before is None
        else io_after.requested - io_before.requested,
        "dropped_experts": samples[-1][1]["dropped_experts"],
    }


def expert_files(engine: Engine) -> list[Path]:
    """The files that hold experts."""
    return sorted({tensor.path for layer in engine.model.store.tensors.values() for tensor in layer})


def environment(engine: Engine) -> dict[str, Any]:
    """What a row's numbers depend on."""
    model = engine.model
    return {
        "tier": model.tier.name,
        "k": model.tier.k,
        "arm": model.arm_name,
        "lora": model.lora_modules > 0,
        "io_threads": model.fixed.io_threads,
        "plan": None if model.plan is None else model.plan.to_dict(),
        "prefill_chunk": engine.prefill_chunk,
        "device": str(mx.default_device()),
        "platform": platform.platform(),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "numpy")},
    }


def row_text(row: Mapping[str, Any]) -> str:
    """A row for people; all of it is in the JSON."""
    lines = {
        "arm": f"{row['arm']}, tier {row['tier']}, K {row['k']}, {'with' if row['lora'] else 'without'} LoRA",
        "first token": f"{figures(row['ttft_seconds'])} s for a prompt of {row['prompt_tokens']} tokens"
        f" ({figures(row['prefill_tokens_per_second'])} tokens/s)",
        "peak memory": f"MLX {size(row['mlx_peak_bytes'])}, process {size(row['process_peak_rss_bytes'])}",
    }
    if row["generated_tokens"] > 1:
        lines["decode"] = (
            f"{figures(row['decode_tokens_per_second'])} tokens/s over {row['generated_tokens']} tokens; a step takes"
            f" {figures(row['decode_step_ms_p50'])} ms, 95 % of them at most {figures(row['decode_step_ms_p95'])} ms,"
            f" {share(row['decode_blocked_share'])} of it waiting for experts"
        )
    if row["decode_expert_hit_rate"] is not None:
        lines["experts"] = (
            f"{share(row['decode_expert_hit_rate'])} were in memory; a token reads"
            f" {figures(row['decode_expert_loads_per_step'])} ({size(row['decode_expert_bytes_per_step'])}),"
            f" {figures(row['decode_expert_late_per_step'])} of them late;"
            f" {size(row['decode_device_bytes_per_step'])} of it from the device"
        )
    if row["expert_overlap"] is not None:
        lines["routing"] = f"{share(row['expert_overlap'])} of a token's experts were the last token's too"
    return "\n".join(f"{name:>12}  {text}" for name, text in lines.items())


def _rates(prompt_tokens: int, samples: Sequence[Sample], device_bytes: int | None) -> dict[str, Any]:
    """From (time, counters) at the start and after every token."""
    (first, at_first), (last, at_last) = samples[1], samples[-1]
    steps = len(samples) - 2
    decode = {name: at_last[name] - at_first[name] for name in COUNTERS}
    pairs = list(itertools.pairwise(samples[1:]))
    step_ms = [1e3 * (after[0] - before[0]) for before, after in pairs]
    blocked_ms = [
        1e3 * (after[1]["blocked_load_seconds"] - before[1]["blocked_load_seconds"]) for before, after in pairs
    ]
    used = decode["expert_hits"] + decode["expert_misses"]

    def each(total: float | None) -> float | None:
        return total / steps if steps and total is not None else None

    return {
        "prompt_tokens": prompt_tokens,
        "generated_tokens": steps + 1,
        "ttft_seconds": first,
        "prefill_tokens_per_second": prompt_tokens / first,
        "decode_tokens_per_second": steps / (last - first) if steps else None,
        "decode_step_ms": step_ms,
        "decode_blocked_ms": blocked_ms,
        **_quantiles("decode_step_ms", step_ms),
        **_quantiles("decode_blocked_ms", blocked_ms),
        "decode_blocked_share": sum(blocked_ms) / sum(step_ms) if steps else None,
        "decode_expert_bytes_per_step": each(decode["expert_bytes"]),
        "decode_expert_loads_per_step": each(decode["expert_loads"]),
        "decode_expert_misses": decode["expert_misses"],
        "decode_expert_late_per_step": each(decode["expert_late_misses"]),
        "decode_expert_hit_rate": decode["expert_hits"] / used if used else None,
        "decode_device_bytes_per_step": each(device_bytes),
        "decode_cold_share": device_bytes / decode["expert_bytes"] if device_bytes and decode["expert_bytes"] else None,
    }


def _quantiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {f"{name}_p50": None, f"{name}_p95": None}
    return {f"{name}_p50": statistics.median(values), f"{name}_p95": sorted(values)[math.ceil(0.95 * len(values)) - 1]}


def _overlap(experts_TLK: Sequence[np.ndarray]) -> float | None:
    """Share of a token's experts that its layer used for the token before, over all layers."""
    if len(experts_TLK) < 2:
        return None
    shares = [
        np.isin(row, before).mean()
        for earlier, later in itertools.pairwise(experts_TLK)
        for before, row in zip(earlier, later, strict=True)
    ]
    return float(np.mean(shares))
