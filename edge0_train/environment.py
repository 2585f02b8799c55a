"""What a run is made with: command line, package versions, code and machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "peft", "accelerate", "datasets", "safetensors", "hydra-core", "wandb")


def peak_rss_mib() -> int:
    """Largest resident set of this process so far, in MiB (Linux counts KiB, macOS bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / 2**20) if sys.platform == "darwin" else round(peak / 2**10)


def environment() -> dict[str, Any]:
    """Command line, versions, code state and machine."""
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "commit": code_commit(),
        "diff": _git("diff", "HEAD"),
    }


def code_commit() -> str:
    """Commit of the checkout that this code runs from, `-dirty` when it has changes; `unknown` outside a checkout."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return "unknown"
    return commit + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no") else "")


def package_version(package: str) -> str:
    """Of an installed package, or `absent`."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _git(*arguments: str) -> str:
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
