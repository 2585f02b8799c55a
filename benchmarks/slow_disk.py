"""Run `edge0_runtime` on a simulated disk: reads of experts take their turn on one device of a given speed.

    python benchmarks/slow_disk.py --mib-s 60 bench models/35b --arms prerouter,on_demand --memory-budget 2.5

Where computing is slow (mlx on a CPU), a real disk is never the bottleneck, and what reading ahead hides can't be seen.
A control group's limit (in_cgroup.py) doesn't show it either: Linux lets through what 100 ms allow at once, so one
layer's experts go at full speed after every pause. Here a read of n bytes occupies the device for n / speed, one after
another in the order of the calls, however many threads wait; the bytes themselves come from the real file.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from edge0_runtime import cli

PREADV = os.preadv


def paced(
    bytes_per_second: float,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Callable[..., int]:
    """`os.preadv` on the simulated device."""
    turn = threading.Lock()
    free_at = 0.0

    def preadv(fd: int, buffers: Sequence[Any], offset: int) -> int:
        nonlocal free_at
        count = PREADV(fd, buffers, offset)
        with turn:
            free_at = max(free_at, clock()) + count / bytes_per_second
            wait = free_at - clock()
        if wait > 0:
            sleep(wait)
        return count

    return preadv


def main() -> int:
    """Entry point; returns the command's exit code."""
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        None, None, description, epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib-s", type=float, required=True, metavar="N", help="speed of the simulated disk")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="arguments of edge0_runtime")
    args = parser.parse_args()
    os.preadv = paced(args.mib_s * 2**20)
    print(f"simulated disk, {args.mib_s:g} MiB/s", file=sys.stderr)
    return cli.main(args.command)


if __name__ == "__main__":
    sys.exit(main())
