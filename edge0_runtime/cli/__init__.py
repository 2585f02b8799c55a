"""The command line: `edge0_runtime COMMAND ...`, also `python -m edge0_runtime`.

    edge0_runtime generate models/nano --prompt "12+34=" --json
    edge0_runtime chat     models/nano --prompt "What is 12+34?"
    edge0_runtime serve    models/nano --port 8080
    edge0_runtime verify   models/nano
    edge0_runtime bench    models/nano
    edge0_runtime bench    models/nano --arms prerouter,on_demand
    edge0_runtime doctor   models/nano
    edge0_runtime inspect  models/nano
    edge0_runtime tiers    35b

`generate` continues raw text, greedily unless told otherwise; `chat` puts turns into the model's chat
template and samples as its generation_config.json says. Errors are a sentence on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence

from edge0_runtime.cli import bench, chat, doctor, generate, inspect, serve, tiers, verify
from edge0_runtime.contract.errors import Edge0Error

# A file is a command: HELP, add_arguments and run. What needs MLX or FastAPI is imported by `run`, so that help, `tiers` and
# `inspect` work on any machine.
COMMANDS = (generate, chat, serve, verify, bench, doctor, inspect, tiers)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = _parser().parse_args(argv)
    in_main_thread = threading.current_thread() is threading.main_thread()
    # Unhandled, the signal kills Python before its cleanup.
    before = signal.signal(signal.SIGTERM, _terminate) if in_main_thread else None
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("edge0_runtime").setLevel(logging.INFO)  # the engine says what it loaded
    try:
        return args.run(args) or 0
    except Edge0Error as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _terminate(number: int, _: object) -> None:
    sys.exit(128 + number)


def _parser() -> argparse.ArgumentParser:
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "edge0_runtime", None, description, epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in COMMANDS:
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser
