"""Run a command with less memory and a slower disk than the machine has, in a control group of its own.

    python benchmarks/in_cgroup.py --memory-gib 6 --read-mib-s 100 -- \
        python -m edge0_runtime bench models/35b --arms prerouter,same_token,history,on_demand --memory-budget 2.5

The page cache of what the command reads counts as its memory, so a limit below the experts' size keeps them on the
disk. Needs root; version 1 and 2 of Linux's control groups. Without either option the command just runs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
NAME = f"edge0-{os.getpid()}"


def make_groups(memory_bytes: int | None, read_bytes_s: int | None, path: Path) -> list[Path]:
    """Control groups with the limits; a process in all of them has both.

    Args:
        memory_bytes: anonymous memory and page cache together. read_bytes_s: of the disk that `path` is on.
    """
    device = f"{os.major(path.stat().st_dev)}:{os.minor(path.stat().st_dev)}"
    if (ROOT / "cgroup.controllers").exists():  # version 2
        (ROOT / "cgroup.subtree_control").write_text("+memory +io")
        settings = [("memory.max", memory_bytes and str(memory_bytes)),
                    ("io.max", read_bytes_s and f"{device} rbps={read_bytes_s}")]  # fmt: skip
        return [_group(ROOT / NAME, settings)]
    return [
        _group(ROOT / "memory" / NAME, [("memory.limit_in_bytes", memory_bytes and str(memory_bytes))]),
        _group(
            ROOT / "blkio" / NAME, [("blkio.throttle.read_bps_device", read_bytes_s and f"{device} {read_bytes_s}")]
        ),
    ]


def _group(folder: Path, settings: Sequence[tuple[str, str | int | None]]) -> Path:
    folder.mkdir()
    for name, value in settings:
        if value:
            (folder / name).write_text(str(value))
    return folder


def main() -> int:
    """Entry point; returns the command's exit code."""
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        None, None, description, epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--memory-gib", type=float, metavar="N")
    parser.add_argument("--read-mib-s", type=float, metavar="N", help="disk reads; page cache hits are free")
    parser.add_argument(
        "--disk-of", type=Path, default=Path("."), metavar="PATH", help="whose disk is slowed (default .)"
    )
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    groups = make_groups(
        args.memory_gib and int(args.memory_gib * 2**30), args.read_mib_s and int(args.read_mib_s * 2**20), args.disk_of
    )

    def enter() -> None:
        for group in groups:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    try:
        return subprocess.run(args.command, preexec_fn=enter).returncode
    finally:
        for group in groups:
            for name in ("memory.max_usage_in_bytes", "memory.peak"):
                if (group / name).exists():
                    peak = int((group / name).read_text()) / 2**30
                    print(f"control group's peak, page cache included: {peak:.2f} GiB", file=sys.stderr)
            group.rmdir()


if __name__ == "__main__":
    sys.exit(main())
