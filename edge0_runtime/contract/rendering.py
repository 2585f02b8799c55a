"""A chat template is a stranger's program, in jinja's sandbox: it gets so much time, and may write so much."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

MAX_TEMPLATE = 2**20
"""Bytes of a template; the longest published ones have 20 kB."""
RENDER_S = 5.0
"""Of one conversation, compiling the template included; a usual one takes milliseconds."""
MAX_RENDERED = 2**25
"""Characters of one prompt, which is tokenised afterwards."""
CODE = "<template>"  # the file name that jinja gives to what it compiles a template to


def rendered(render: Callable[[], str]) -> str:
    """What `render` gives, which runs a template. Raises TimeoutError or ValueError where it takes too long or gives too much.

    The clock is looked at whenever a line of the template or any function begins, so a single long operation of Python's own (a
    string repeated a billion times) isn't interrupted.
    """
    until, before = time.perf_counter() + RENDER_S, sys.gettrace()

    def watch(frame: FrameType, event: str, argument: Any) -> Any:
        if time.perf_counter() > until:
            raise TimeoutError(f"it takes longer than {RENDER_S:g} seconds")
        return watch if frame.f_code.co_filename == CODE else None

    sys.settrace(watch)
    try:
        text = render()
    finally:
        sys.settrace(before)
    if len(text) > MAX_RENDERED:
        raise ValueError(f"it writes {len(text):,} characters, more than {MAX_RENDERED:,}")
    return text
