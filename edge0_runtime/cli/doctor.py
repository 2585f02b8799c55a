"""edge0_runtime doctor: what this machine and its disk give the engine; loads no weights."""

from __future__ import annotations

import argparse
import json

from edge0_runtime.cli.options import add_directory

HELP = "what this machine and its disk give the engine; loads no weights"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL_DIR, and how much of it to read at every depth, in MiB."""
    add_directory(parser)
    parser.add_argument("--read-mib", type=float, default=256, metavar="N", help="experts read at every depth")
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> None:
    """Print what was measured, for people or as one JSON object."""
    from edge0_runtime.measure.doctor import doctor, doctor_text

    data = doctor(args.model_dir, args.tier, int(args.read_mib * 2**20))
    print(json.dumps(data, indent=2) if args.json else doctor_text(data))
