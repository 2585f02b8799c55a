"""edge0_runtime doctor: will a model run here, and how fast; it need not be here for that."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from edge0_runtime.cli.options import at_least_one
from edge0_runtime.contract.tier import Sticky

HELP = "will a model run, and how fast? Loads no weights and downloads none"
EXAMPLES = """\
edge0_runtime doctor models/nano
edge0_runtime doctor 35b --memory 16 --disk-mib-s 2000
edge0_runtime doctor ORG/NAME@main --json"""
MIB, GIB = 2**20, 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is asked about, the machine that it is asked for, and how the disk here is measured."""
    parser.add_argument(
        "what",
        metavar="WHAT",
        help="a model directory, a built-in tier or its YAML file, or a Hub id: ORG/NAME[@REVISION]",
    )
    parser.add_argument("--adapters", metavar="DIR", help="directory or Hub id of the adapter files, if not in WHAT")
    parser.add_argument("--tier", metavar="NAME", help="which adapter files, or the tier of a base without any")
    parser.add_argument("--k", type=int, metavar="N", help="as if adapters for this K were there")
    parser.add_argument(
        "--sticky", type=_sticky, metavar="BIAS,WINDOW", help="as if adapters for this stickiness were there"
    )
    parser.add_argument("--memory", type=_positive, metavar="GIB", help="of the machine; default: this one's")
    parser.add_argument(
        "--memory-budget",
        type=_positive,
        metavar="GIB",
        help="that it is served with; default: a quarter of the machine's",
    )
    parser.add_argument(
        "--context", type=at_least_one, metavar="N", help="tokens that memory is reserved for (default 4096)"
    )
    parser.add_argument("--disk-mib-s", type=_positive, metavar="N", help="speed of the disk; default: measured here")
    parser.add_argument(
        "--probe-dir", type=Path, default=Path(), metavar="DIR",
        help="on the disk to be measured, if the model isn't here: a file is written and deleted (default: this directory)",
    )  # fmt: skip
    parser.add_argument(
        "--read-mib", type=_positive, default=256, metavar="N", help="read at every depth, to measure it"
    )
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    """Print what is expected, for people or as one JSON object; 1 if it doesn't fit the memory."""
    from edge0_runtime.measure.doctor import doctor
    from edge0_runtime.measure.doctor_text import doctor_text

    data = doctor(
        args.what,
        tier_name=args.tier,
        k=args.k,
        sticky=args.sticky,
        adapters=args.adapters,
        memory_bytes=None if args.memory is None else int(args.memory * GIB),
        budget_bytes=None if args.memory_budget is None else int(args.memory_budget * GIB),
        context=args.context,
        disk_bytes_per_second=None if args.disk_mib_s is None else args.disk_mib_s * MIB,
        probe_dir=args.probe_dir,
        read_bytes=int(args.read_mib * MIB),
    )
    print(json.dumps(data, indent=2) if args.json else doctor_text(data))
    return 0 if data["budget"] else 1


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return value


def _sticky(text: str) -> Sticky:
    try:
        bias, window = text.split(",")
        return Sticky(float(bias), int(window))
    except ValueError as problem:
        raise argparse.ArgumentTypeError(f"{text}: must be BIAS,WINDOW, e.g. 2,2") from problem
