"""How fast one engine is: prefill and decode apart, expert traffic, and memory; JSON values for each prompt."""

from __future__ import annotations

import itertools
import platform
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from edge0_runtime.engine import Engine

COUNTERS = ("expert_loads", "expert_bytes", "expert_hits", "expert_misses", "blocked_load_seconds")


def bench(engine: Engine, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> Iterator[dict[str, Any]]:
    """Greedy runs of `max_tokens` tokens each, end tokens ignored; JSON values for each prompt.

    Memory is reported as two numbers that mean different things: MLX's allocator peak since the
    prompt began, and the process's peak resident set since it started, which includes whatever ran before.
    """
    for prompt_ids in prompts:
        mx.reset_peak_memory()
        samples = [(time.perf_counter(), engine.stats())]
        for _ in engine.generate(prompt_ids, max_tokens=max_tokens, ignore_eos=True):
            samples.append((time.perf_counter(), engine.stats()))
        yield _environment(engine) | _row(len(prompt_ids), samples)


def _row(prompt_tokens: int, samples: Sequence[tuple[float, dict[str, Any]]]) -> dict[str, Any]:
    """Rates from (time, counters) at the start and after every token."""
    (start, _), (first, at_first), (last, at_last) = samples[0], samples[1], samples[-1]
    steps = len(samples) - 2
    decode = {name: at_last[name] - at_first[name] for name in COUNTERS}
    used = decode["expert_hits"] + decode["expert_misses"]
    blocked_ms = [
        1e3 * (after[1]["blocked_load_seconds"] - before[1]["blocked_load_seconds"])
        for before, after in itertools.pairwise(samples[1:])
    ]
    return {
        "prompt_tokens": prompt_tokens,
        "generated_tokens": steps + 1,
        "ttft_seconds": first - start,
        "prefill_tokens_per_second": prompt_tokens / (first - start),
        "decode_tokens_per_second": steps / (last - first) if steps else None,
        "decode_expert_bytes_per_step": decode["expert_bytes"] / steps if steps else None,
        "decode_expert_loads_per_step": decode["expert_loads"] / steps if steps else None,
        "decode_expert_hit_rate": decode["expert_hits"] / used if used else None,
        "decode_blocked_ms_p50": statistics.median(blocked_ms) if blocked_ms else None,
        "decode_blocked_ms_p95": sorted(blocked_ms)[int(0.95 * (steps - 1))] if blocked_ms else None,
        "dropped_experts": at_last["dropped_experts"],
        "mlx_peak_bytes": mx.get_peak_memory(),
        "process_peak_rss_bytes": _peak_rss_bytes(),
    }


def _environment(engine: Engine) -> dict[str, Any]:
    model = engine.model
    return {
        "tier": model.tier.name,
        "k": model.tier.k,
        "prerouter": model.prerouter is not None,
        "lora": model.lora_modules > 0,
        "expert_slots": 0 if model.memory is None else model.memory.slots,
        "prefill_chunk": engine.prefill_chunk,
        "device": str(mx.default_device()),
        "platform": platform.platform(),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "numpy")},
    }


def _peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB here
