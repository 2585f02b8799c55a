"""edge0_runtime chat: turns in the model's chat template, sampled as its generation_config.json says."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from edge0_runtime.cli.options import add_engine_options, load_engine, shower, unicode_text
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import printable

if TYPE_CHECKING:
    from edge0_runtime.engine import Engine

HELP = "talk to the model in its chat template"
COMMANDS = """\
/help    what you read now
/reset   forget the conversation
/exit    end; so does Ctrl-D
Ctrl-C   stop an answer
A message that begins with / needs a space before it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine's options, one question or none, and how answers are sampled."""
    add_engine_options(parser)
    parser.add_argument("--prompt", type=unicode_text, metavar="TEXT", help="one question, one answer, no conversation")
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
        if args.prompt is None:
            _converse(engine, args)
            return
        result = reply(engine, [{"role": "user", "content": args.prompt}], args, shower(args.json))
        print(json.dumps(result.to_dict()) if args.json else "")


def _converse(engine: Engine, args: argparse.Namespace) -> None:
    from edge0_runtime.cli.generation import RefusedTurnError, reply

    with contextlib.suppress(ImportError):  # from now on `input` has arrow keys and a history
        import readline  # noqa: F401
    turns: list[dict[str, str]] = []
    _say("Ctrl-D ends the conversation, /help says what else there is.")
    while (text := _ask()) is not None:
        if text.startswith("/"):
            if text.strip() == "/exit":
                return
            if text.strip() == "/reset":
                turns.clear()
            _say({"/reset": "a new conversation"}.get(text.strip(), COMMANDS))
            continue
        if not text.strip():
            continue
        asked = [*turns, {"role": "user", "content": text}]
        try:
            with _stopped_by_interrupt() as cancel:
                result = reply(engine, asked, args, shower(False), cancel)
        except RefusedTurnError as problem:
            _say(f"{problem}, or /reset the conversation")
            continue
        print()
        turns = [*asked, {"role": "assistant", "content": result.text}]
        if result.finish_reason == "length":
            full = len(result.prompt_ids) + len(result.ids) >= engine.context_length
            _say("the context is full; /reset begins a new conversation" if full else "cut at --max-tokens")


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr)


def _ask() -> str | None:
    """A line of the user's; None at the end."""
    while True:
        try:
            return unicode_text(input("> "))
        except EOFError:
            return None
        except KeyboardInterrupt:
            _say("\nCtrl-D or /exit ends the conversation")
        except (UnicodeError, argparse.ArgumentTypeError):
            _say("that is not UTF-8 text; type it again")


@contextlib.contextmanager
def _stopped_by_interrupt() -> Iterator[threading.Event]:
    """Ctrl-C sets the event that this gives; a second one is a KeyboardInterrupt as elsewhere."""
    cancel = threading.Event()

    def interrupt(*_: object) -> None:
        if cancel.is_set():
            raise KeyboardInterrupt
        cancel.set()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield cancel
    finally:
        signal.signal(signal.SIGINT, before)
