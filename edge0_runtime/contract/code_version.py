"""Which code runs: the installed version, and the checkout's commit."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def tool_version() -> str:
    """The installed edge0's version; 0+unknown in a checkout that is not installed."""
    try:
        return version("edge0")
    except PackageNotFoundError:
        return "0+unknown"


def code_commit() -> str:
    """Commit of the checkout that this code runs from, `-dirty` when it has changes; `unknown` outside a checkout."""
    commit = git("rev-parse", "HEAD")
    if not commit:
        return "unknown"
    return commit + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")


def git(*arguments: str) -> str:
    """What git says of this checkout, without the newline at its end; "" where it fails."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
