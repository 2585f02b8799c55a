"""What both packages ask of the machine they run on."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path


def memory_limit_bytes(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """What this process may use: the machine's memory, or its control group's limit if that is less (Linux, both versions)."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for line in proc.read_text().splitlines() if proc.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):  # a group's limit holds for those below it
            if (folder / name).exists() and (text := (folder / name).read_text().strip()) != "max":
                limits.append(int(text))
            if folder == base:
                break
    return min(limits)


def cpu_name(info: Path = Path("/proc/cpuinfo")) -> str:
    """The processor as its maker calls it; its architecture where the system doesn't say."""
    if platform.system() == "Darwin":
        done = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True)
        return done.stdout.strip() or platform.machine()
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def cpu_count() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
