"""edge0_runtime bench: speed and memory of one arm, or of several against each other."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys

from edge0_runtime.arms import ARMS, arm_class
from edge0_runtime.cli.options import add_engine_options, at_least_one, load_engine, unicode_text

HELP = "measure speed and memory"
EXAMPLES = """\
edge0_runtime bench models/nano
edge0_runtime bench models/nano --arms prerouter,on_demand --rounds 4
edge0_runtime bench models/nano --share"""
PROMPTS = ("What is 17 times 4?", "Explain step by step why the sky is blue and sunsets are red.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine's options, prompts, and which arms to compare."""
    add_engine_options(parser)
    parser.add_argument(
        "--prompt", action="append", type=unicode_text, metavar="TEXT", help="may be repeated; default: two questions"
    )
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N")
    parser.add_argument(
        "--arms",
        type=_arms,
        metavar="A,B",
        help="compare these on the same tokens, there and back; the last is the measure",
    )
    parser.add_argument("--rounds", type=at_least_one, default=2, metavar="N", help="with --arms: times there and back")
    parser.add_argument(
        "--page-cache", choices=("keep", "run", "token"), default="keep",
        help="with --arms: leave it, or drop the experts' files before each run or each token",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON line per prompt")
    parser.add_argument(
        "--share",
        action="store_true",
        help="at the end one block to paste into a report: machine, disk, settings, medians",
    )


def run(args: argparse.Namespace) -> None:
    """Print each prompt's figures as they come, or the table of arms at the end; with --json one line a run on stdout.

    With --share that block alone.

    An arm that holds all experts gets a second engine, without heads.
    """
    from edge0_runtime.measure.ab import compare, table
    from edge0_runtime.measure.bench import bench, row_text
    from edge0_runtime.measure.share import share_block
    from edge0_runtime.text import chat_ids

    with contextlib.ExitStack() as engines:
        engine = engines.enter_context(load_engine(args))
        texts = args.prompt or PROMPTS
        prompts = [chat_ids(engine.tokenizer, [{"role": "user", "content": text}]) for text in texts]
        if args.arms is None:
            runs = bench(engine, prompts, max_tokens=args.max_tokens)
        else:
            resident = None
            held = [arm for arm in args.arms if not arm_class(arm).streams]
            if held:
                args.arm, args.prerouter = held[0], False
                resident = engines.enter_context(load_engine(args))
            runs = compare(
                engine, prompts, arms=args.arms, max_tokens=args.max_tokens, rounds=args.rounds,
                page_cache=args.page_cache, resident=resident,
            )  # fmt: skip
        rows = []
        for row in runs:
            rows.append(row)
            if args.json:
                print(json.dumps(row), flush=True)
            elif args.arms is None and not args.share:
                print(row_text(row), end="\n\n", flush=True)
        out = sys.stderr if args.json else sys.stdout
        if args.share:
            print(share_block(engine, rows), file=out)
        elif args.arms is not None:
            print(table(rows, args.arms[-1]), file=out)


def _arms(text: str) -> list[str]:
    arms = text.split(",")
    if unknown := [arm for arm in arms if arm not in ARMS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose of {', '.join(ARMS)}")
    return arms
