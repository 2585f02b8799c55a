"""Options of `serve` about the server itself: who may ask, what an answer is like by default, what is logged."""

from __future__ import annotations

import argparse
from pathlib import Path

from edge0_runtime.cli.options import at_least_one
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.model_files import SAMPLING, sampling_problem
from edge0_runtime.server.logs import LEVELS, configure
from edge0_runtime.server.settings import Settings


def add_serving_options(parser: argparse.ArgumentParser) -> None:
    """Read by `settings_of` and `configure_logs`."""
    access = parser.add_argument_group("who may ask")
    access.add_argument(
        "--host",
        default="localhost",
        help="(default %(default)s: 127.0.0.1 and ::1); one that other machines reach needs an API key",
    )
    access.add_argument("--port", type=int, default=8080, help="(default %(default)s; 0: one that is free)")
    access.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="API keys, one a line, beside that of EDGE0_API_KEY; where there is one, every request needs one",
    )
    access.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="may be repeated: a name that clients call this server by, beside localhost: host.docker.internal",
    )
    access.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="may be repeated: web pages that may use this server (CORS), as https://app.example; * for all",
    )
    answers = parser.add_argument_group("answers, where a request doesn't say")
    answers.add_argument("--max-tokens", type=at_least_one, metavar="N", help="default: what fits the context")
    answers.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="a jinja template in place of the model's, as was not trained",
    )
    for name in SAMPLING:
        answers.add_argument(
            f"--{name.replace('_', '-')}", type=float, metavar="X", help="default: the model's generation_config.json"
        )
    logs = parser.add_argument_group("log, on stderr")
    logs.add_argument("--log-level", choices=LEVELS, default="info", help="(default %(default)s)")
    logs.add_argument("--log-json", action="store_true", help="one JSON object a line; never a prompt's text")


def settings_of(args: argparse.Namespace) -> Settings:
    """What the arguments set. Raises Edge0Error where a value can't be honoured."""
    sampling = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    for problem in filter(None, (sampling_problem(name, value) for name, value in sampling.items())):
        raise Edge0Error(f"--{problem.replace('_', '-', 1)}; correct it, or leave it out")
    if "top_k" in sampling:
        sampling["top_k"] = int(sampling["top_k"])
    return Settings(
        api_key_file=args.api_key_file,
        allow_origins=tuple(args.allow_origin),
        allow_hosts=tuple(args.allow_host),
        max_tokens=args.max_tokens,
        sampling=sampling,
    )


def configure_logs(args: argparse.Namespace) -> None:
    """Before the first line."""
    configure(as_json=args.log_json, level=args.log_level)
