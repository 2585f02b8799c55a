"""edge0_runtime inspect: contract and provenance of a model directory, on any machine; loads no weights."""

from __future__ import annotations

import argparse
import json

from edge0_runtime.cli.options import add_directory, resolve_directories
from edge0_runtime.contract.files import printable
from edge0_runtime.inspection import inspect, inspection_text

LINES = 1000  # a directory's phases, metrics and parents, each on its own
HELP = "contract and provenance of a model directory; loads no weights"
EXAMPLES = """\
edge0_runtime inspect models/nano
edge0_runtime inspect ORG/NAME@main --adapters runs/b/adapters --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL_DIR, and the form of the answer."""
    add_directory(parser)
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> None:
    """Print contract and provenance, for people or as one JSON object."""
    resolve_directories(args)
    data = inspect(args.model_dir, args.tier, args.adapters)
    print(json.dumps(data, indent=2) if args.json else printable(inspection_text(data), lines=LINES))
