"""A conversation at the terminal: commands are for the program, Ctrl-C stops an answer, a full context can be left behind."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge0_runtime.cli import main
from edge0_runtime.engine import Engine, Token
from tests.runtime.conftest import CONTEXT

Hold = Callable[..., tuple[str, str]]


@pytest.fixture
def prompts_seen(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ids of every prompt that the engine gets."""
    seen: list[list[int]] = []
    generate = Engine.generate

    def listen(self: Engine, prompt_ids: list[int], **options: Any) -> Iterator[Token]:
        seen.append(list(prompt_ids))
        return generate(self, prompt_ids, **options)

    monkeypatch.setattr(Engine, "generate", listen)
    return seen


@pytest.fixture
def hold(tiny_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Hold:
    """hold(*lines, max_tokens=4) -> (stdout, stderr) of the conversation; a line that is an exception is raised."""

    def call(*lines: str | type[BaseException], max_tokens: int = 4) -> tuple[str, str]:
        left = iter(lines)

        def next_line(_: str) -> str:
            line = next(left, EOFError)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", next_line)
        assert main(["chat", str(tiny_dir), "--temperature", "0", "--max-tokens", str(max_tokens)]) == 0
        out, err = capsys.readouterr()
        return out, err.partition("Ctrl-D ends")[2]

    return call


def test_commands_do_not_reach_the_model(hold, prompts_seen):
    _, err = hold("/help", "/nothing", "", "1+1", "/exit", "2+2")
    assert len(prompts_seen) == 1
    assert err.count("/reset   forget the conversation") == 2


def test_reset_begins_anew(hold, prompts_seen):
    hold("1+1", "1+1", "/reset", "1+1")
    first, second, third = prompts_seen
    assert second[: len(first)] == first and len(second) > len(first) and third == first


def test_a_full_context_is_said_and_can_be_left_behind(hold, prompts_seen):
    """An answer up to the context's end, a question too long for it, and one that fits."""
    _, err = hold("1+1", "2+2", "/reset", "3+3", "1" * CONTEXT, max_tokens=CONTEXT)
    assert len(prompts_seen) == 2
    assert err.count("the context is full; /reset begins a new conversation") == 2
    assert (
        err.count(f"leave no room to answer in a context of {CONTEXT}; shorten them, or /reset the conversation") == 2
    )


def test_a_refused_turn_is_forgotten(hold, prompts_seen):
    hold("1" * CONTEXT, "1+1")
    (only,) = prompts_seen
    assert len(only) < 30


def test_ctrl_c_stops_the_answer_and_not_the_program(hold, prompts_seen, monkeypatch):
    generate = Engine.generate

    def interrupted(self: Engine, prompt_ids: list[int], **options: Any) -> Iterator[Token]:
        for token in generate(self, prompt_ids, **options):
            yield token
            if token.index == 2 and len(prompts_seen) == 1:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Engine, "generate", interrupted)
    before = signal.getsignal(signal.SIGINT)
    hold("1+1", KeyboardInterrupt, "2+2", max_tokens=30)
    first, second = prompts_seen
    assert len(first) < len(second) < len(first) + 20, "three tokens of the first answer are part of the conversation"
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_twice_ends_the_program(tiny_dir, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda _: "1+1")
    generate = Engine.generate

    def interrupted(self: Engine, prompt_ids: list[int], **options: Any) -> Iterator[Token]:
        for token in generate(self, prompt_ids, **options):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            yield token

    monkeypatch.setattr(Engine, "generate", interrupted)
    assert main(["chat", str(tiny_dir)]) == 130


def test_what_is_no_text_is_asked_for_again(hold, prompts_seen):
    _, err = hold("\udcff", UnicodeError, "1+1")
    assert len(prompts_seen) == 1 and err.count("not UTF-8 text") == 2


def test_arrow_keys_edit_the_line_on_a_terminal(tiny_dir):
    """`/hlp`, two steps to the left, `e`: that is /help."""
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "edge0_runtime", "chat", str(tiny_dir)]
    with subprocess.Popen(
        command, stdin=child, stdout=child, stderr=child, env=os.environ | {"TERM": "xterm"}
    ) as process:
        os.close(child)
        seen = b""

        def until(word: bytes) -> None:
            nonlocal seen
            while word not in seen:
                assert select.select([parent], [], [], 60)[0], seen
                seen += os.read(parent, 4096)

        until(b"> ")
        os.write(parent, b"/hlp\x1b[D\x1b[De\r")
        until(b"/reset   forget the conversation")
        os.write(parent, b"/exit\r")
        assert process.wait(60) == 0
    os.close(parent)
