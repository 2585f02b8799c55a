"""What a run is made with: command line, package versions, code and machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import sys
from typing import Any

from edge0_runtime.contract.code_version import code_commit, git

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
        "diff": git("diff", "HEAD"),
    }


def package_version(package: str) -> str:
    """Of an installed package, or `absent`."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
