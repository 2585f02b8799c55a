"""Time to the first token of prompts by length, what they read, and what the first steps after them miss.

    python scripts/make_synthetic_checkpoint.py benchmarks/first_token.yaml models/first-token
    python -m benchmarks.first_token models/first-token --memory-budget 0.05 --mib-s 20 > rows.jsonl

A row for each arm, prompt length and round, on a simulated disk (slow_disk.py) and from empty slots. `separate` is the
prerouter with one chunk after the other. `floor_seconds`: the longer of what `resident` takes and the row's bytes at the
disk's speed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import circumstances
from benchmarks.slow_disk import SlowDisk
from edge0_runtime.contract.edge import parser_of
from edge0_runtime.engine import Engine

ARMS = ("resident", "on_demand", "separate", "prerouter")
STEPS = 16  # after the first token: whose misses are counted


def measure(engine: Engine, prompt_ids: list[int]) -> dict[str, Any]:
    """Seconds to the first token, and counters up to it and of the STEPS after it."""
    before, began = engine.stats(), time.perf_counter()
    tokens = engine.generate(prompt_ids, max_tokens=STEPS + 1, ignore_eos=True)
    first = next(tokens)
    seconds, at_first = time.perf_counter() - began, engine.stats()
    ids = [first.token, *(token.token for token in tokens)]
    after = engine.stats()
    return {
        "ttft_seconds": seconds,
        "blocked_seconds": at_first["blocked_load_seconds"] - before["blocked_load_seconds"],
        "bytes": at_first["expert_bytes"] - before["expert_bytes"],
        "misses_after": after["expert_misses"] - at_first["expert_misses"],
        "tokens": ids,
    }


def rows_of(arm: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """An arm's rows: all rounds of all prompts."""
    budget = None if arm == "resident" else args.memory_budget
    with Engine.load(
        args.model_dir,
        arm="prerouter" if arm == "separate" else arm,
        memory_budget=budget,
        io_threads=args.io_threads,
    ) as engine:
        if arm == "separate":
            engine.prefill_width = engine.prefill_chunk
        rng = np.random.default_rng(0)
        rows = []
        for length, number in itertools.product(args.prompts, range(args.rounds)):
            prompt_ids = rng.integers(3, engine.model.vocab_size, size=length).tolist()
            if arm != "resident":
                engine.forget_experts()
            measured = measure(engine, prompt_ids)
            rows.append(
                {
                    "arm": arm,
                    "prompt_tokens": length,
                    "round": number,
                    "chunk": engine.prefill_chunk,
                    "width": engine.prefill_width,
                    "slots": engine.stats()["expert_slots"],
                    "load_average": os.getloadavg()[0],
                    **measured,
                }
            )
            print(f"{arm}, {length} tokens: {measured['ttft_seconds']:.2f} s", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Entry point; the arguments are those of the module's docstring."""
    parser = parser_of(__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--memory-budget", type=float, required=True, metavar="GIB")
    parser.add_argument("--mib-s", type=float, required=True, metavar="N", help="speed of the simulated disk")
    parser.add_argument("--prompts", type=int, nargs="+", default=[32, 512, 2048], metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--io-threads", type=int, default=2)
    args = parser.parse_args()
    began = circumstances()
    found = {"resident": rows_of("resident", args)}
    os.preadv = SlowDisk(args.mib_s * 2**20).slowed(os.preadv, int)
    found |= {arm: rows_of(arm, args) for arm in ARMS[1:]}
    computing = {
        length: statistics.median(row["ttft_seconds"] for row in found["resident"] if row["prompt_tokens"] == length)
        for length in args.prompts
    }
    for row in itertools.chain.from_iterable(found.values()):
        floor = max(computing[row["prompt_tokens"]], row["bytes"] / args.mib_s / 2**20)
        print(json.dumps(began | {"mib_s": args.mib_s, "floor_seconds": floor} | row))


if __name__ == "__main__":
    main()
