"""Does what is measured lie in the band that `doctor` expects? Both on a simulated disk, taking turns.

python benchmarks/doctor_band.py models/bound-k4 --memory-budget 0.45 --mib-s 400 200
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path

from benchmarks.slow_disk import SlowDisk
from edge0_runtime.contract.edge import parser_of
from edge0_runtime.engine import Engine
from edge0_runtime.measure.bench import run
from edge0_runtime.measure.doctor import doctor
from edge0_runtime.text import chat_ids
from edge0_runtime.units import figures

MIB, GIB = 2**20, 2**30
PREADV = os.preadv


def main() -> None:
    """Print a line for each speed of the disk."""
    parser = parser_of(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--memory-budget", type=float, required=True, metavar="GIB")
    parser.add_argument("--mib-s", type=float, nargs="+", default=[400.0, 200.0], metavar="N")
    parser.add_argument("--max-tokens", type=int, default=32, metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    args = parser.parse_args()
    for mib_s in args.mib_s:
        measured: list[float] = []
        worst: list[float] = []
        best: list[float] = []
        for _ in range(args.rounds):
            data = doctor(
                str(args.directory), budget_bytes=int(args.memory_budget * GIB), disk_bytes_per_second=mib_s * MIB
            )
            low, high = data["budget"]["tokens_per_second"]
            worst.append(low)
            best.append(high)
            os.preadv = SlowDisk(mib_s * MIB).slowed(PREADV, int)
            try:
                with Engine.load(args.directory, memory_budget=args.memory_budget) as engine:
                    prompt = chat_ids(engine.tokenizer, [{"role": "user", "content": "Hi"}])
                    measured.append(run(engine, prompt, max_tokens=args.max_tokens)["decode_tokens_per_second"])
            finally:
                os.preadv = PREADV
        band = statistics.median(worst), statistics.median(best)
        speed = statistics.median(measured)
        verdict = "inside" if band[0] <= speed <= band[1] else "OUTSIDE"
        print(
            f"{mib_s:g} MiB/s: expected {' to '.join(map(figures, band))} tokens/s,"
            f" measured {figures(speed)} ({figures(min(measured))} to {figures(max(measured))}): {verdict}",
            flush=True,
        )


if __name__ == "__main__":
    main()
