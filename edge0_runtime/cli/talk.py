"""A conversation at the terminal: what is typed is a question, or begins with `/` and is for the program."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge0_runtime.cli.conversation import Conversation, Wrapping
from edge0_runtime.cli.generation import Generation, RefusedTurnError, reply
from edge0_runtime.cli.options import shower, unicode_text
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import printable
from edge0_runtime.units import figures, share, size

if TYPE_CHECKING:
    from edge0_runtime.engine import Engine

WIDEST = 100  # columns of what the program says
COMMANDS = {
    "/help": "what you read now",
    "/reset": "forget the conversation",
    "/undo": "forget the last question and its answer",
    "/retry": "answer the last question again",
    "/system": "TEXT: the system prompt; without TEXT: show it",
    "/save": "FILE: write the conversation as JSON",
    "/load": "FILE: go on with a saved conversation",
    "/stats": "speed, reads and memory of the last answer",
    "/exit": "end; so does Ctrl-D",
}
MORE = """\
Ctrl-C   stop an answer
A message that begins with / needs a space before it."""


class Talk:
    """The conversation of one terminal with one engine; `args` are the `chat` command's."""

    def __init__(self, engine: Engine, args: argparse.Namespace, conversation: Conversation) -> None:
        self._engine, self._args, self._conversation = engine, args, conversation
        self._last: tuple[Generation, dict[str, Any]] | None = (
            None  # the last answer, and what it added to the counters
        )
        self._commands: dict[str, Callable[[str], None]] = {
            name: getattr(self, "_" + name.removeprefix("/")) for name in COMMANDS if name != "/exit"
        }

    def hold(self) -> None:
        """Answer until the end of input, or /exit."""
        with _line_editing(self._args.history):
            _say("Ctrl-D ends the conversation, /help says what else there is.")
            while (text := _ask("" if self._args.json else "> ")) is not None:
                if not text.strip():
                    continue
                if not text.startswith("/"):
                    self._answer(text)
                    continue
                name, _, argument = text.strip().partition(" ")
                if name == "/exit":
                    return
                if name not in self._commands:
                    _say(f"{name}: no such command; /help lists them")
                    continue
                try:
                    self._commands[name](argument.strip())
                except Edge0Error as problem:
                    _say(str(problem))

    def _answer(self, question: str) -> bool:
        """Ask, show, remember; returns whether there was an answer."""
        before = self._engine.stats()
        show, finish = _shower(self._args.json)
        try:
            with _stopped_by_interrupt() as cancel:
                messages = self._conversation.messages(question)
                result = reply(self._engine, messages, self._args, show, cancel)
        except RefusedTurnError as problem:
            _say(f"{problem}, or /reset the conversation")
            return False
        finish()
        if self._args.json:
            print(json.dumps(result.to_dict()), flush=True)
        after = self._engine.stats()
        self._last = result, {name: after[name] - before[name] for name in after}
        if result.finish_reason == "cancelled" and not result.text:
            _say("stopped before the first word; nothing is kept of it")
            return False
        self._conversation.add(question, result.text)
        if result.finish_reason == "length":
            full = len(result.prompt_ids) + len(result.ids) >= self._engine.context_length
            _say("the context is full; /reset begins a new conversation" if full else "cut at --max-tokens")
        return True

    # -- commands ------------------------------------------------------------------------------------------------------

    def _help(self, _: str) -> None:
        _say("\n".join([*(f"{name:<8} {text}" for name, text in COMMANDS.items()), MORE]))

    def _reset(self, _: str) -> None:
        self._conversation.turns.clear()
        _say("a new conversation" + (", with the same system prompt" if self._conversation.system else ""))

    def _undo(self, _: str) -> None:
        question = self._conversation.undo()
        _say("there is no question to forget" if question is None else f"forgotten: {question}")

    def _retry(self, _: str) -> None:
        before = list(self._conversation.turns)
        question = self._conversation.undo()
        if question is None:
            _say("there is no question to answer again")
            return
        if self._args.seed is not None:  # the same seed would give the same answer
            self._args.seed += 1
        if not self._answer(question):
            self._conversation.turns = before

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = None if text == '""' else text
        system = self._conversation.system
        _say("there is no system prompt" if system is None else f'system prompt, removed by /system "":\n{system}')

    def _save(self, file: str) -> None:
        path = _path(file, "/save")
        self._conversation.save(path, str(self._engine.model_dir))
        _say(f"{path}: {len(self._conversation.turns)} messages")

    def _load(self, file: str) -> None:
        path = _path(file, "/load")
        self._conversation.load(path)
        _say(f"{path}: {len(self._conversation.turns)} messages; /retry answers the last question again")

    def _stats(self, _: str) -> None:
        if self._last is None:
            _say("nothing was answered yet")
            return
        (answer, counted), engine = self._last, self._engine
        times, prompt, count = answer.to_dict()["timings"], len(answer.prompt_ids), len(answer.ids)
        used = counted["expert_hits"] + counted["expert_misses"]
        hits = counted["expert_hits"] / used if used else None
        now = engine.stats()
        _say(
            f"answer   {count} tokens, {figures(times['decode_tokens_per_s'], ' tokens/s')}\n"
            f"prompt   {prompt} tokens, {counted['prefix_tokens']} known; first token after"
            f" {figures(times['first_token_s'], ' s')}\n"
            f"context  {prompt + count} of {engine.context_length} tokens\n"
            f"reads    {counted['expert_loads']} experts, {size(counted['expert_bytes'])}; {share(hits)} were there\n"
            f"waiting  {figures(counted['blocked_load_seconds'], ' s')} for reads\n"
            f"memory   {now['experts_held']} experts held, {size(now['expert_slot_bytes'])}"
        )


def _path(file: str, command: str) -> Path:
    if not file:
        raise Edge0Error(f"{command}: which file? Write {command} FILE")
    return Path(os.path.expanduser(file))


def _say(text: str) -> None:
    """To the user, on stderr; on a terminal in lines that fit it."""
    if sys.stderr.isatty():
        width = min(shutil.get_terminal_size().columns, WIDEST)
        text = "\n".join(textwrap.fill(line, width, break_long_words=False) for line in text.split("\n"))
    print(printable(text, lines=1000), file=sys.stderr)


def _shower(quiet: bool) -> tuple[Callable[[str], None], Callable[[], None]]:
    """(prints text as it comes, ends it); nothing is printed if `quiet`. On a terminal lines break between words."""
    if quiet or not sys.stdout.isatty():
        return shower(quiet), (lambda: None) if quiet else print
    wrapping = Wrapping(shutil.get_terminal_size().columns)
    return (lambda text: print(wrapping.add(text), end="", flush=True)), (lambda: print(wrapping.finish()))


def _ask(prompt: str) -> str | None:
    """A line of the user's; None at the end."""
    while True:
        try:
            return unicode_text(input(prompt))
        except EOFError:
            return None
        except KeyboardInterrupt:
            _say("\nCtrl-D or /exit ends the conversation")
        except (UnicodeError, argparse.ArgumentTypeError):
            _say("that is not UTF-8 text; type it again")


@contextlib.contextmanager
def _line_editing(history: Path | None) -> Iterator[None]:
    """Inside the block `input` has arrow keys, Tab for commands, and a history, which a file keeps if one is given.

    Raises Edge0Error where the file can't be read.
    """
    try:
        import readline
    except ImportError:  # a Python without it
        yield
        return

    def complete(text: str, number: int) -> str | None:
        return next(iter([name for name in COMMANDS if name.startswith(text or "/")][number:]), None)

    readline.set_completer(complete)
    readline.set_completer_delims(" ")
    readline.parse_and_bind("tab: complete")
    if history is not None and history.exists():
        try:
            readline.read_history_file(history)
        except OSError as problem:
            raise Edge0Error(f"--history {history}: {problem.strerror}; choose another file") from problem
    try:
        yield
    finally:
        if history is not None:
            try:
                readline.write_history_file(history)
            except OSError as problem:
                _say(f"--history {history}: not written: {problem.strerror}")


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
