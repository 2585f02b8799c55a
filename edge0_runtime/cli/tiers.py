"""edge0_runtime tiers: the built-in tiers, or all tensors of one, on any machine."""

from __future__ import annotations

import argparse
import json

from edge0_runtime.contract.tier import builtin_tier, builtin_tier_names, read_tier
from edge0_runtime.inspection import describe_tier, tier_line, tier_text

HELP = "the built-in tiers, or all tensors of one"
EXAMPLES = """\
edge0_runtime tiers
edge0_runtime tiers 35b --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A tier or none, and the form of the answer."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="a built-in tier, or a file ending in .yaml")
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> None:
    """Print one line for every built-in tier, or all tensors of the one named."""
    if args.name is not None:
        data = describe_tier(read_tier(args.name))
        print(json.dumps(data, indent=2) if args.json else tier_text(data))
        return
    tiers = [builtin_tier(name).to_dict() for name in builtin_tier_names()]
    print(json.dumps(tiers, indent=2) if args.json else "\n".join(map(tier_line, tiers)))
