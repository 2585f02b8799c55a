"""The one edge of both packages: whatever a command raises ends here, as one sentence and an exit code.

code  meaning
0     done
1     measured, and found wanting (`verify`: does not serve as trained)
2     something that the user can act on: a setting, a file, the disk, a missing package; the sentence says what and how
3     a fault of ours or of a library: the sentence says where; `--debug` prints the traceback
130   stopped by Ctrl-C (SIGINT), 143 by SIGTERM; 128 + n by signal n. What was finished is kept
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import one_line, printable, unquoted

DONE, WANTING, PROBLEM, FAULT = 0, 1, 2, 3
DEBUG = "--debug"
Explain = Callable[[BaseException], str | None]
"""A library's exception -> the sentence for it, or None where it is not known."""


class Stopped(SystemExit):
    """A signal arrived: unwinds like `sys.exit(128 + number)`, so that every `finally` runs; its text is the sentence for it."""

    def __init__(self, number: int, sentence: str = "") -> None:
        super().__init__(128 + number)
        self.number, self.sentence = number, sentence or f"stopped by {signal.Signals(number).name}"

    def __str__(self) -> str:
        return self.sentence


def parser_of(doc: str | None, prog: str | None = None) -> argparse.ArgumentParser:
    """The parser of a command whose module says in its docstring what it does, and behind the first line how."""
    description, _, epilog = (doc or "").partition("\n\n")
    return argparse.ArgumentParser(
        prog, None, description, epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def run_command(command: Callable[[], int | None], *, debug: bool, explain: Sequence[Explain] = ()) -> int:
    """Run `command` to its end; returns the exit code (see the module), after the sentence on stderr.

    Args:
        command: returns its exit code; None is 0.
        debug: print the traceback before the sentence.
        explain: the sentences for exceptions of libraries that only the caller's package knows.
    """
    try:
        with terminable():
            return command() or DONE
    except BrokenPipeError:  # the reader of our output (head, less) has seen enough
        mute_stdout()
        return DONE
    except KeyboardInterrupt as stop:
        return _told(stop, str(stop) or "stopped by Ctrl-C", 128 + signal.SIGINT, debug)
    except Stopped as stop:
        return _told(stop, str(stop), 128 + stop.number, debug)
    except Exception as error:
        sentence = next((text for text in (one(error) for one in (*explain, explained)) if text), None)
        if sentence is None:
            return _told(error, f"error: {unexpected(error)}", FAULT, debug)
        return _told(error, f"error: {sentence}", PROBLEM, debug)


def mute_stdout() -> None:
    """Send what is still to be printed nowhere: its reader has gone, and the last flush would fail."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Inside the block SIGTERM raises `Stopped`: unhandled, it kills Python before its cleanup. In threads: nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def held() -> Iterator[Callable[[], None]]:
    """Inside the block SIGINT and SIGTERM wait, for libraries that take what a handler raises for an error of their own.

    Yields a function that ends the waiting earlier; a signal that has come is obeyed then. In threads: nothing waits.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    seen: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda came, _: seen.append(came)) for number in numbers}

    def release() -> None:
        while before:
            signal.signal(*before.popitem())
        while seen:
            signal.raise_signal(seen.pop())

    try:
        yield release
    finally:
        release()


def _terminate(number: int, _: object) -> None:
    raise Stopped(number)


def explained(error: BaseException) -> str | None:
    """The sentence for what the user can act on, of the errors that any command may meet."""
    if isinstance(error, Edge0Error):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"{error.name}: not installed; install it with `pip install {error.name.partition('.')[0]}`"
    if isinstance(error, MemoryError):
        return "memory: this machine has not enough for what was asked; ask for less, or free some"
    if isinstance(error, OSError) and error.errno is not None:
        where = next((os.fsdecode(name) for name in (error.filename, error.filename2) if name), "a file")
        return f"{unquoted(where)}: {error.strerror} ({errno.errorcode.get(error.errno, error.errno)}); {_fix(error.errno)}"
    return None


def _fix(number: int) -> str:
    fixes = {
        errno.ENOSPC: "free space on that disk",
        errno.EDQUOT: "free space within your quota",
        errno.EACCES: "give yourself the right to it, or choose another path",
        errno.EPERM: "give yourself the right to it, or choose another path",
        errno.EROFS: "choose a path on a file system that can be written",
        errno.ENOENT: "correct the path",
        errno.EISDIR: "give a file",
        errno.ENOTDIR: "give a directory",
        errno.EMFILE: "raise the limit with `ulimit -n 4096`",
        errno.ENAMETOOLONG: "choose a shorter name",
        errno.ELOOP: "mend the symbolic link",
    }
    return fixes.get(number, "mend that and run the command again")


def unexpected(error: BaseException) -> str:
    """One line for an exception that nobody foresaw: its type, its text, and the innermost line of ours that it came through."""
    packages = (Path(__file__).parents[1], Path(__file__).parents[2] / "edge0_train")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if any(Path(frame.filename).is_relative_to(package) for package in packages)
    ]
    where = f" at {'/'.join(Path(frames[-1].filename).parts[-2:])}:{frames[-1].lineno}" if frames else ""
    told = f"{type(error).__name__}{where}: {one_line(error)}"
    return f"{told}; run it again with {DEBUG} for the traceback, and report it with that"


def _told(error: BaseException, sentence: str, code: int, debug: bool) -> int:
    with contextlib.suppress(OSError, ValueError):  # stderr may be gone
        if debug:
            print(printable("".join(traceback.format_exception(error)), lines=1000), file=sys.stderr)
        print(printable(sentence), file=sys.stderr, flush=True)
    return code
