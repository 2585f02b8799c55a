"""edge0_runtime verify: does the directory serve as it was trained? Exit code 1 if it doesn't."""

from __future__ import annotations

import argparse
import json

from edge0_runtime.cli.options import add_engine_options, load_engine

HELP = "check that the directory serves as it was trained"
EXAMPLES = """\
edge0_runtime verify models/nano
edge0_runtime verify models/base --adapters runs/b/adapters --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine's options, and the form of the report."""
    add_engine_options(parser)
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    """Replay the reference trace of the export, print the report; 0 if nothing fails, else 1."""
    from edge0_runtime.contract.traces import read_trace
    from edge0_runtime.measure.verify import report_text, verify

    with load_engine(args, float32=True) as engine:
        directory = args.adapters or args.model_dir
        trace = read_trace(directory / engine.model.tier.file_name("verify"), engine.model.tier)
        report = verify(engine, trace)
    print(json.dumps(report.to_dict()) if args.json else report_text(report))
    return 0 if report.ok else 1
