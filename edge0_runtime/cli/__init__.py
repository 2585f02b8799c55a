"""The command line: `edge0_runtime COMMAND ...`, also `python -m edge0_runtime`.

    edge0_runtime chat     models/nano --prompt "Add 299 and 289."
    edge0_runtime generate models/nano --prompt "9+9+0=18 9+8+1=" --json
    edge0_runtime serve    models/nano --port 8080
    edge0_runtime launch   aider
    edge0_runtime verify   models/nano
    edge0_runtime bench    models/nano --arms prerouter,on_demand
    edge0_runtime doctor   models/nano
    edge0_runtime inspect  models/nano
    edge0_runtime tiers    35b
    eval "$(edge0_runtime completion bash)"

`edge0_runtime COMMAND --help` has examples. A model is a directory, or ORG/NAME[@REVISION] on the Hugging Face Hub.
`generate` continues raw text, greedily unless told otherwise; `chat` puts turns into the model's chat
template and samples as its generation_config.json says. An error is one sentence on stderr, `--debug` adds its traceback.
Exit codes: 0 done; 1 measured and found wanting; 2 something you can act on; 3 a fault; 128 + n stopped by signal n.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import textwrap
from collections.abc import Sequence

from edge0_runtime.cli import bench, chat, completion, doctor, generate, inspect, launch, serve, tiers, verify
from edge0_runtime.contract.edge import DEBUG, parser_of, run_command
from edge0_runtime.contract.files import printable

# A file is a command: HELP, EXAMPLES, add_arguments and run. What takes time to import is imported by `run`, so that help and Tab
# answer at once, and `tiers` and `inspect` work on any machine.
COMMANDS = (generate, chat, serve, launch, verify, bench, doctor, inspect, tiers, completion)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = _parser()
    if completion.ASKED in os.environ:  # by the shell, at a Tab; ends the process
        completion.answer(parser)
    args = parser.parse_args(argv)
    _log_to_stderr()
    return run_command(lambda: args.run(args), debug=args.debug)


class _Printable(logging.Formatter):
    """A warning may quote the model directory."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Printable("%(message)s"))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("edge0_runtime").setLevel(logging.INFO)  # the engine says what it loaded


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, "edge0_runtime")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in COMMANDS:
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(
            name, help=module.HELP, description=module.HELP, epilog="examples:\n" + textwrap.indent(module.EXAMPLES, "  "),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        module.add_arguments(command)
        command.add_argument(DEBUG, action="store_true", help="print the traceback of an error")
        command.set_defaults(run=module.run)
    return parser
