"""Being asked to stop: the first SIGINT or SIGTERM is obeyed between two pieces of work, the second one at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.utils import gather_object

from edge0_runtime.contract.edge import Stopped

NOTED = b"\nstopping after the step or batch at hand; a second signal stops at once\n"


class Interrupted(Stopped):
    """A signal ended the work between two pieces of it; all that was finished is on the disk."""


class _Watch:
    """Of the process, as signals are: whether a block of `polled` is open, and the signal noted in it (0: none)."""

    is_open = False
    noted = 0


_watch = _Watch()


@contextmanager
def polled() -> Iterator[Callable[[], int]]:
    """Inside the block the first SIGINT or SIGTERM is only noted; yields what tells its number, 0 while there is none.

    The second signal acts as outside the block, and so does a noted one at the block's end if nobody has obeyed it. Blocks
    nest: an inner one tells what the outer has noted. In threads nothing is noted.
    """
    if _watch.is_open or threading.current_thread() is not threading.main_thread():
        yield lambda: _watch.noted
        return
    before: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _: object) -> None:
        _watch.noted = number
        restore()
        os.write(2, NOTED)  # a print may have been interrupted

    try:
        _watch.is_open = True
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, note)
        yield lambda: _watch.noted
        missed = _watch.noted
    finally:
        restore()
        _watch.is_open, _watch.noted = False, 0
    if missed:
        signal.raise_signal(missed)


def heard_anywhere(number: int) -> int:
    """The signal that any rank has noted, 0 for none, on all ranks alike; a rank waits here for the others.

    Args:
        number: the signal that this rank has noted, or 0.
    """
    heard: int = max(gather_object([number]))
    return heard


def leave(heard: int, finished: str) -> None:
    """Raise `Interrupted` unless `heard` is 0; `finished` is what is on the disk: the end of the sentence."""
    if heard:
        raise Interrupted(heard, f"stopped by {signal.Signals(heard).name}: {finished}")


def leave_together(number: int, finished: str) -> None:
    """`leave` on all ranks when any of them has noted a signal (`heard_anywhere`)."""
    leave(heard_anywhere(number), finished)
