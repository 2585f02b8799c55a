"""edge0_runtime generate: continue raw text or token ids, greedily unless told otherwise."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from edge0_runtime.cli.options import add_engine_options, load_engine, shower, unicode_text

HELP = "continue a text"
EXAMPLES = """\
edge0_runtime generate models/nano --prompt "9+9+0=18 9+8+1="
edge0_runtime generate models/nano --prompt-ids 1,267 --max-tokens 32 --json --trace trace.jsonl
edge0_runtime generate models/base --adapters runs/b/adapters --prompt 9+8+1="""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine's options, a prompt as text or as ids, and how its continuation is chosen and shown."""
    add_engine_options(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument(
        "--prompt",
        type=unicode_text,
        metavar="TEXT",
        help="raw text: no chat template, no control tokens (--prompt-ids takes them)",
    )
    prompt.add_argument("--prompt-ids", type=_ids, metavar="1,2,3", help="token ids")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, help="default 0: the most likely token")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, help="of the sampling; drawn if left out")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after an end token")
    parser.add_argument("--json", action="store_true", help="one object with ids, text, usage and timings")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the executed experts of every step as JSON lines"
    )


def run(args: argparse.Namespace) -> None:
    """Print the continuation as it comes, or with --json one object at the end; --trace writes its file meanwhile."""
    from edge0_runtime.cli.generation import expert_trace, generate
    from edge0_runtime.contract.prompts import text_ids
    from edge0_runtime.sampling import Sampling

    sampling = Sampling(args.max_tokens, args.temperature, args.top_p, seed=args.seed)
    with load_engine(args) as engine:
        prompt_ids = text_ids(engine.tokenizer, args.prompt) if args.prompt_ids is None else args.prompt_ids
        with expert_trace(args.trace, engine.model.tier, prompt_ids) as record:
            result = generate(engine, prompt_ids, sampling, shower(args.json), args.ignore_eos, record)
    print(json.dumps(result.to_dict()) if args.json else "")


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as problem:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3") from problem
