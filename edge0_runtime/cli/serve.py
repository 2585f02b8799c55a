"""edge0_runtime serve: OpenAI's chat API over HTTP."""

from __future__ import annotations

import argparse
import json
import os

from edge0_runtime.cli.models import asked, load_catalog, model_name, named
from edge0_runtime.cli.options import add_engine_options, add_prefix_options
from edge0_runtime.cli.serving import add_serving_options, configure_logs, settings_of

HELP = "serve OpenAI's chat API over HTTP"
EXAMPLES = """\
edge0_runtime serve models/nano --port 8080
edge0_runtime serve ORG/NAME@main --memory-budget 4 --alias local
edge0_runtime serve --model base=models/nano,no-prerouter,no-lora --model both=models/nano"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine's options, the models by name, and the server's."""
    add_engine_options(parser, optional=True)
    add_prefix_options(parser)
    parser.add_argument(
        "--model",
        action="append",
        type=named,
        metavar="NAME=DIR[,...]",
        help="instead of MODEL_DIR, may be repeated: models of one base by the names that requests ask for; options:"
        " no-prerouter, no-lora, arm=ARM, adapters=DIR, tier=NAME",
    )
    parser.add_argument(
        "--alias", type=model_name, metavar="NAME", help="what requests call the model (default: edge0-<tier>)"
    )
    add_serving_options(parser)
    parser.add_argument(
        "--json", action="store_true", help="one object on stdout as soon as requests are taken: url, models, pid"
    )


def run(args: argparse.Namespace) -> None:
    """Take the address before loading, so that one in use is said at once; serve until a signal ends it."""
    from edge0_runtime.server.address import bind
    from edge0_runtime.server.guard import Access
    from edge0_runtime.server.running import loading, serve

    configure_logs(args)
    models, settings = asked(args), settings_of(args)
    access = Access.to(args.host, settings)  # what is wrong with it is said now
    with bind(args.host, args.port) as address:
        with loading(address):
            catalog = load_catalog(args, models)
        with catalog:
            if args.json:
                print(json.dumps({"url": address.url, "models": list(catalog), "pid": os.getpid()}), flush=True)
            serve(catalog, address, settings, access)
