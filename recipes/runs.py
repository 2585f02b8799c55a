"""What recipes share: a nano run's configuration, and runs that are done once and continued when they were stopped."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from edge0_runtime.contract.artifacts import Adapter, Kind
from edge0_train.adapters import read_input
from edge0_train.cli import run_phase
from edge0_train.config import Config, configure
from edge0_train.run import read_summary


def add_settings(parser: argparse.ArgumentParser) -> None:
    """`--set a.b=c ...`: settings of every run, on top of the recipe's."""
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="A.B=C", help="settings of every run, e.g. tier.consumers.last=7"
    )


def configure_run(phase: str, directory: Path, *overrides: str) -> Config:
    """The configuration of one run, on nano unless `overrides`, as on the command line, name another tier.

    An existing directory is continued.
    """
    tier = [] if any(override.startswith("tier=") for override in overrides) else ["tier=nano"]
    resume = str(directory.exists()).lower()
    common = (f"phase={phase}", *tier, f"run_dir={directory}", f"resume={resume}", "logger.wandb=disabled")
    return configure(*common, *overrides)


def run_once(phase: str, directory: Path, *overrides: str) -> None:
    """One phase in `directory`, unless it is finished there."""
    if read_summary(directory) is None:
        run_phase(configure_run(phase, directory, *overrides))


def finished(directory: Path) -> dict[str, Any]:
    """The summary of a run that is there. Raises FileNotFoundError when it is not finished."""
    summary = read_summary(directory)
    if summary is None:
        raise FileNotFoundError(f"{directory}: not finished")
    return summary


def adapter_of(config: Config, kind: Kind, directory: Path) -> Adapter:
    """The adapter that the run in `directory` wrote."""
    adapter = read_input(config, kind, str(directory))
    assert adapter  # None is for an empty path
    return adapter
