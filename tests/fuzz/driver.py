"""A command on a damaged tree, in a worker that is killed if it hangs, and what must hold of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fuzz.commands import Command
from tests.fuzz.damage import snapshot

HUNG_S = 60.0  # of a machine that may be busy; a command that computes for ten seconds is too slow before
CPU_S = 10.0
PROGRESS = "\r|\x1b\\[A"  # a bar begins its line anew, a second one goes back up
MORE_BYTES = 512 * 2**20
CODES = (0, 1, 2)
TREES = int(os.environ.get("EDGE0_FUZZ_TREES", "100"))
OFFLINE = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}


class Worker:
    """A process that runs one program's commands; `code` is the last one's exit code."""

    code: object = None

    def __init__(self, program: str) -> None:
        self._command = [sys.executable, str(Path(__file__).with_name("worker.py")), program]
        self._process: subprocess.Popen[str] | None = None

    def run(self, arguments: Sequence[str], directory: Path) -> dict[str, Any]:
        """What the worker answers, or {"died": how}."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | OFFLINE
            )
        process, hung = self._process, threading.Event()
        assert process.stdin is not None and process.stdout is not None

        def kill() -> None:
            hung.set()
            process.kill()

        timer = threading.Timer(HUNG_S, kill)
        timer.start()
        print(json.dumps([str(directory), *arguments]), file=process.stdin, flush=True)
        line = process.stdout.readline()
        timer.cancel()
        if line:
            result = dict(json.loads(line))
            self.code = result["code"]
            return result
        code = process.wait()
        self._process = None
        return {"died": "hung" if hung.is_set() else f"exit code {code}"}

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()


def problems(worker: Worker, command: Command, tree: Path, more: Sequence[str] = ()) -> list[str]:
    """Everything that is wrong with how a command ends on this tree; empty where it does its work or says why it can't.

    `more` are further arguments.
    """
    before = snapshot(tree)
    result = worker.run([*(part.format(tree=tree) for part in command.arguments.split()), *more], tree)
    changed = dict.fromkeys(sorted(name for name, _ in before.items() ^ snapshot(tree).items()))
    found = [f"changed {name}" for name in changed if not any(Path(name).is_relative_to(one) for one in command.writes)]
    if "died" in result:
        return [*found, result["died"]]
    sentence = re.sub(PROGRESS, "\n", result["err"]).rstrip("\n")
    if result["code"] not in CODES:
        found.append(f"exit code {result['code']}: {sentence[-1500:]}")
    if result["code"] == 2 and "error: " not in sentence:
        found.append(f"exit code 2 without a sentence: {sentence[-1500:]}")
    if "Traceback" in sentence:
        found.append(f"a traceback: {sentence[-1500:]}")
    plain = result["out"] if command.plain else ""
    if strange := {character for character in sentence + plain if not (character.isprintable() or character == "\n")}:
        found.append(f"control characters on a terminal: {strange}")
    if result["seconds"] > CPU_S:
        found.append(f"{result['seconds']:.0f} s")
    if result["more_bytes"] > MORE_BYTES:
        found.append(f"{result['more_bytes'] / 2**20:.0f} MiB more")
    return found
