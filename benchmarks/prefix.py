"""Time to the first token of a prompt whose beginning is known from an earlier request, beside that of the whole prompt.

    python scripts/make_synthetic_checkpoint.py nano models/nano-synthetic
    python scripts/make_synthetic_checkpoint.py 35b models/35b-9-layers --layers 9 --experts 32 --vocab 4096
    python -m benchmarks.prefix models/nano-synthetic models/35b-9-layers --memory-budget 1 > rows.jsonl

In one process and by turns, each round with another system prompt of PREFIX tokens, and a question behind it: `off` keeps
nothing; `first` takes snapshots; `hit` asks another question after the same system prompt. A row a round and way; the ids of
`off` and `hit` must be equal. On standard error, medians and their ratio for each directory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import circumstances
from edge0_runtime.contract.edge import parser_of
from edge0_runtime.engine import Engine
from edge0_runtime.units import figures

TOKENS = 8  # of an answer


def ask(engine: Engine, prompt: list[int]) -> dict[str, Any]:
    """Seconds to the first token, and what was known and read for it."""
    before, began = engine.stats(), time.perf_counter()
    tokens = engine.generate(prompt, max_tokens=TOKENS, ignore_eos=True)
    first = next(tokens)
    seconds, after = time.perf_counter() - began, engine.stats()
    return {
        "ttft_seconds": seconds,
        "prompt_tokens": len(prompt),
        "cached_tokens": first.cached_tokens,
        "expert_bytes": after["expert_bytes"] - before["expert_bytes"],
        "tokens": [first.token, *(token.token for token in tokens)],
    }


def rows_of(directory: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All rounds of a model, the ways by turns."""
    memory = {"memory_budget": args.memory_budget, "context": args.prefix + args.question + TOKENS + 1}
    rng, rows = np.random.default_rng(0), []
    with (
        Engine.load(directory, **memory) as off,
        Engine.load(directory, **memory, prefix_cache=args.prefix_cache) as keeping,
    ):
        end = min(keeping.eos_ids)
        outside = [token for token in range(3, keeping.model.vocab_size) if token not in keeping.eos_ids]
        for engine in (off, keeping):
            ask(engine, outside[: args.question])  # warms up
        for number in range(args.rounds):
            system = [*rng.choice(outside, args.prefix - 1).tolist(), end]
            questions = [rng.choice(outside, args.question).tolist() for _ in range(2)]
            found = {
                "first": ask(keeping, system + questions[0]),
                "off": ask(off, system + questions[1]),
                "hit": ask(keeping, system + questions[1]),
            }
            if found["off"]["tokens"] != found["hit"]["tokens"]:
                raise SystemExit(f"{directory}, round {number}: other tokens than without the cache")
            rows += [
                {"model": directory.name, "round": number, "way": way, "load_average": os.getloadavg()[0], **row}
                for way, row in found.items()
            ]
    return rows


def summary(rows: list[dict[str, Any]]) -> str:
    """Medians in ms, and how much later the first token comes without what is known."""
    of = {way: [row["ttft_seconds"] for row in rows if row["way"] == way] for way in ("off", "first", "hit")}
    medians = {way: statistics.median(seconds) for way, seconds in of.items()}
    ratios = sorted(off / hit for off, hit in zip(of["off"], of["hit"], strict=True))
    said = ", ".join(f"{way} {figures(1e3 * seconds, ' ms')}" for way, seconds in medians.items())
    middle = figures(statistics.median(ratios))
    return f"{rows[0]['model']}: {said}; off / hit {middle} ({figures(ratios[0])} to {figures(ratios[-1])})"


def main() -> None:
    """Entry point; the arguments are those of the module's docstring."""
    parser = parser_of(__doc__)
    parser.add_argument("model_dirs", type=Path, nargs="+", metavar="MODEL_DIR")
    parser.add_argument(
        "--memory-budget", type=float, metavar="GIB", help="of each of two engines; default: the planner's"
    )
    parser.add_argument("--prefix-cache", type=float, default=0.25, metavar="GIB", help="default %(default)s")
    parser.add_argument(
        "--prefix", type=int, default=1000, metavar="TOKENS", help="known beginning (default %(default)s)"
    )
    parser.add_argument("--question", type=int, default=24, metavar="TOKENS", help="behind it (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    began = circumstances()
    for directory in args.model_dirs:
        rows = rows_of(directory, args)
        for row in rows:
            print(json.dumps(began | row), flush=True)
        print(summary(rows), file=sys.stderr)


if __name__ == "__main__":
    main()
