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
from collections.abc import Callable
from typing import Any, TypeVar

from edge0_runtime import cli
from edge0_runtime.contract.edge import parser_of

T = TypeVar("T")


class SlowDisk:
    """A device that carries one read after another, in the order of the calls.

    Attributes:
        bytes_per_second: its speed; may be changed. carried: bytes so far.
    """

    def __init__(
        self,
        bytes_per_second: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bytes_per_second, self.carried = bytes_per_second, 0
        self._clock, self._sleep = clock, sleep
        self._turn = threading.Lock()
        self._free_at = 0.0

    def slowed(self, read: Callable[..., T], size: Callable[[T], int]) -> Callable[..., T]:
        """`read` behind this device. `size`: bytes of what a call returns."""

        def slow(*args: Any) -> T:
            found = read(*args)
            with self._turn:
                self.carried += size(found)
                self._free_at = max(self._free_at, self._clock()) + size(found) / self.bytes_per_second
                wait = self._free_at - self._clock()
            if wait > 0:
                self._sleep(wait)
            return found

        return slow


def main() -> int:
    """Entry point; returns the command's exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--mib-s", type=float, required=True, metavar="N", help="speed of the simulated disk")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="arguments of edge0_runtime")
    args = parser.parse_args()
    os.preadv = SlowDisk(args.mib_s * 2**20).slowed(os.preadv, int)
    print(f"simulated disk, {args.mib_s:g} MiB/s", file=sys.stderr)
    return cli.main(args.command)


if __name__ == "__main__":
    sys.exit(main())
