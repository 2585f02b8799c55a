"""edge0_runtime chat: turns in the model's chat template, sampled as its generation_config.json says."""

from __future__ import annotations

import argparse
import json
import sys

from edge0_runtime.cli.options import add_engine_options, load_engine, shower
from edge0_runtime.contract.errors import Edge0Error

HELP = "talk to the model in its chat template"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine's options, one question or none, and how answers are sampled."""
    add_engine_options(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="one question, one answer, no conversation")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of one answer; default: what the context holds")
    parser.add_argument("--temperature", type=float, help="default: the model's generation_config.json, else 1")
    parser.add_argument("--top-p", type=float, help="default: the model's generation_config.json, else 1")
    parser.add_argument("--seed", type=int, help="of the sampling; drawn if left out")
    parser.add_argument("--json", action="store_true", help="with --prompt: one object, as from generate")


def run(args: argparse.Namespace) -> None:
    """Answer one question, or hold a conversation until end of input. Raises Edge0Error for --json without --prompt."""
    from edge0_runtime.cli.generation import reply

    if args.json and args.prompt is None:
        raise Edge0Error("--json: a conversation has no one result; give --prompt too")
    with load_engine(args) as engine:
        if args.prompt is not None:
            result = reply(engine, [{"role": "user", "content": args.prompt}], args, shower(args.json))
            print(json.dumps(result.to_dict()) if args.json else "")
            return
        turns: list[dict[str, str]] = []
        print("Ctrl-D ends the conversation.", file=sys.stderr)
        while (text := _ask()) is not None:
            if not text.strip():
                continue
            turns.append({"role": "user", "content": text})
            result = reply(engine, turns, args, shower(False))
            turns.append({"role": "assistant", "content": result.text})
            print()


def _ask() -> str | None:
    try:
        return input("> ")
    except EOFError:
        return None
