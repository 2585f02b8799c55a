"""edge0_runtime chat: turns in the model's chat template, sampled as its generation_config.json says."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from edge0_runtime.cli.options import add_engine_options, add_prefix_options, load_engine, shower, unicode_text

HELP = "talk to the model in its chat template"
EXAMPLES = """\
edge0_runtime chat models/nano
edge0_runtime chat models/nano --system "Answer briefly." --seed 1
edge0_runtime chat models/nano --prompt "Add 299 and 289." --json
edge0_runtime chat ORG/NAME@main --memory-budget 4"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine's options, one question or none, and how answers are sampled."""
    add_engine_options(parser)
    add_prefix_options(parser)
    parser.add_argument("--prompt", type=unicode_text, metavar="TEXT", help="one question, one answer, no conversation")
    parser.add_argument("--system", type=unicode_text, metavar="TEXT", help="the system prompt")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of one answer; default: what the context holds")
    parser.add_argument("--temperature", type=float, help="default: the model's generation_config.json, else 1")
    parser.add_argument("--top-p", type=float, help="default: the model's generation_config.json, else 1")
    parser.add_argument("--seed", type=int, help="of the sampling; drawn if left out")
    parser.add_argument("--history", type=Path, metavar="FILE", help="keep the lines that were typed from talk to talk")
    parser.add_argument("--json", action="store_true", help="one object an answer, as from generate, and nothing else")


def run(args: argparse.Namespace) -> None:
    """Answer one question, or hold a conversation until end of input."""
    from edge0_runtime.cli.conversation import Conversation
    from edge0_runtime.cli.generation import reply
    from edge0_runtime.cli.talk import Talk

    conversation = Conversation(args.system)
    with load_engine(args) as engine:
        if args.prompt is None:
            Talk(engine, args, conversation).hold()
            return
        result = reply(engine, conversation.messages(args.prompt), args, shower(args.json))
        print(json.dumps(result.to_dict()) if args.json else "")
