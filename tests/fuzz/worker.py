"""Runs one command after the other in one process, since importing the libraries takes longer than most commands; may be killed.

    python tests/fuzz/worker.py edge0_runtime.cli:main

Reads a JSON list per line from standard input, the working directory and the arguments; writes a JSON object with what came of
them per line.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import tempfile
import time
import traceback

from edge0_runtime.host.memory import peak_rss_bytes, reset_peak_rss

SHOWN = 2**16  # characters of an output
GIB = 2**30


def main(target: str) -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    resource.setrlimit(resource.RLIMIT_DATA, (4 * GIB, 4 * GIB))  # what wants more fails, and not the machine
    module, _, name = target.partition(":")
    command = getattr(importlib.import_module(module), name)
    PREPARE[module]()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        for line in sys.stdin:
            for file in (out, err):
                os.ftruncate(file.fileno(), 0)
                os.lseek(file.fileno(), 0, os.SEEK_SET)
            reset_peak_rss()
            idle, began = peak_rss_bytes(), time.process_time()
            try:
                directory, *sys.argv[1:] = json.loads(line)
                os.chdir(directory)
                code = command() or 0
            except SystemExit as end:
                code = end.code
            except BaseException:
                code = traceback.format_exc()
            seconds, peak = time.process_time() - began, peak_rss_bytes()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            answer = {"code": code, "seconds": seconds, "more_bytes": peak - idle, "out": _text(out), "err": _text(err)}
            print(json.dumps(answer), file=answers, flush=True)


def _text(file: tempfile._TemporaryFileWrapper[bytes]) -> str:
    size = os.fstat(file.fileno()).st_size
    tail = os.pread(file.fileno(), SHOWN, max(0, size - SHOWN))
    return tail.decode("utf-8", "replace")


def _never_serve() -> None:
    """`serve` goes as far as a server that could be started."""
    import uvicorn

    uvicorn.Server.run = lambda *_, **__: None


def _import_phases() -> None:
    """What a command imports is no memory that a damaged file costs."""
    from edge0_train.config import PHASES

    for phase in PHASES:
        importlib.import_module(f"edge0_train.phases.{phase}")
    importlib.import_module("edge0_train.doctor")


PREPARE = {"edge0_runtime.cli": _never_serve, "edge0_train.cli": _import_phases}


if __name__ == "__main__":
    main(sys.argv[1])
