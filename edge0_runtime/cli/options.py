"""Arguments that commands share, and the engine that follows from them. MLX is imported only when one is loaded."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge0_runtime.arms import ARMS
from edge0_runtime.experts.reader import IO_THREADS
from edge0_runtime.hub import adapters_of, directory_of

if TYPE_CHECKING:
    from edge0_runtime.engine import Engine

CACHE_DIR_GIB = 8.0


def add_directory(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """MODEL_DIR and which adapters of it, or beside it."""
    parser.add_argument(
        "model_dir",
        nargs="?" if optional else None,
        metavar="MODEL_DIR",
        help="int4 base, tokenizer and adapter files: a directory, or a repository on the Hub as ORG/NAME[@REVISION]",
    )
    parser.add_argument(
        "--adapters", metavar="DIR", help="directory or ORG/NAME[@REVISION] of the adapter files, if not in MODEL_DIR"
    )
    parser.add_argument("--tier", metavar="NAME", help="which adapter files, if the directory holds several or none")


def resolve_directories(args: argparse.Namespace) -> None:
    """Put the paths of `add_directory` in the place of names on the Hub, and fetch what isn't there."""
    args.model_dir = directory_of(str(args.model_dir))
    if args.adapters is not None:
        args.adapters = adapters_of(str(args.adapters))


def add_engine_options(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """MODEL_DIR and how it is served; `load_engine` reads them."""
    add_directory(parser, optional=optional)
    parser.add_argument("--no-prerouter", dest="prerouter", action="store_false", help="layers keep their own gates")
    parser.add_argument("--no-lora", dest="lora", action="store_false", help="serve without the recovery LoRA")
    parser.add_argument(
        "--memory-budget",
        type=float,
        metavar="GIB",
        help="for weights, adapters, context, activations and experts; default: a quarter of the machine's",
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens that the budget reserves memory for (default 4096, or the model's)",
    )
    parser.add_argument(
        "--kv-bits",
        type=int,
        choices=(8, 4),
        help="quantise keys and values, which is not what was trained; default: as they are computed",
    )
    parser.set_defaults(prefix_cache=0.0, cache_dir=None, cache_dir_limit=CACHE_DIR_GIB)
    parser.add_argument(
        "--arm", choices=ARMS, help="how experts are routed and read, to be measured against each other"
    )
    parser.add_argument(
        "--io-threads", type=int, default=IO_THREADS, metavar="N", help="that read experts (default %(default)s)"
    )
    parser.add_argument("--allow-mismatch", action="store_true", help="serve files that were not made together")


def add_prefix_options(parser: argparse.ArgumentParser) -> None:
    """What is kept of a conversation for its next turn, in a command that has conversations; `load_engine` reads them."""
    parser.add_argument(
        "--prefix-cache",
        type=float,
        default=None,
        metavar="GIB",
        help="of the budget, for what is known of earlier prompts; 0: nothing is kept; default: an eighth of the budget",
    )
    parser.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="write it there too, to be found after a restart; default: nowhere",
    )
    parser.add_argument(
        "--cache-dir-limit",
        type=float,
        default=CACHE_DIR_GIB,
        metavar="GIB",
        help="that it may take there, the oldest goes first (default %(default)s)",
    )


def load_engine(args: argparse.Namespace, *, float32: bool = False) -> Engine:
    """The engine that the arguments ask for; `float32` as in `Engine.load`."""
    from edge0_runtime.engine import Engine

    escape_libraries()
    resolve_directories(args)
    return Engine.load(
        args.model_dir,
        adapters=args.adapters,
        prerouter=args.prerouter,
        lora=args.lora,
        arm=args.arm,
        tier_name=args.tier,
        float32=float32,
        **shared_options(args),
    )


def shared_options(args: argparse.Namespace) -> dict[str, Any]:
    """What one engine and several that share their memory are loaded with."""
    memory = ("memory_budget", "context", "kv_bits", "prefix_cache", "cache_dir", "cache_dir_limit")
    names = (*memory, "io_threads", "allow_mismatch")
    return {name: getattr(args, name) for name in names}


def escape_libraries() -> None:
    """What transformers says may quote a directory's files: through our handler, which escapes."""
    from edge0_runtime.libraries import transformers_logging

    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()


def unicode_text(text: str) -> str:
    """An argument that becomes tokens: bytes of another encoding have no characters."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as problem:
        raise argparse.ArgumentTypeError("it is not valid UTF-8") from problem
    return text


def at_least_one(text: str) -> int:
    """An argument that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value


def shower(quiet: bool) -> Callable[[str], None]:
    """Prints text as it comes, or nothing."""
    return (lambda _: None) if quiet else (lambda text: print(text, end="", flush=True))
