"""A conversation at the terminal: commands are for the program, Ctrl-C stops an answer, a full context can be left behind."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge0_runtime.cli import main
from edge0_runtime.cli.conversation import Wrapping
from edge0_runtime.engine import Engine, Token
from edge0_runtime.sequence import Sequence
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

    def call(*lines: str | type[BaseException], max_tokens: int = 4, more: tuple[str, ...] = ()) -> tuple[str, str]:
        left = iter(lines)

        def next_line(_: str) -> str:
            line = next(left, EOFError)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", next_line)
        assert main(["chat", str(tiny_dir), "--temperature", "0", "--max-tokens", str(max_tokens), *more]) == 0
        out, err = capsys.readouterr()
        return out, err.partition("Ctrl-D ends")[2]

    return call


def test_commands_do_not_reach_the_model(hold, prompts_seen):
    _, err = hold("/help", "/nothing", "", "1+1", "/exit", "2+2")
    assert len(prompts_seen) == 1
    assert err.count("/reset   forget the conversation") == 1
    assert "/nothing: no such command; /help lists them" in err


def test_reset_begins_anew(hold, prompts_seen):
    hold("1+1", "1+1", "/reset", "1+1")
    first, second, third = prompts_seen
    assert second[: len(first)] == first and len(second) > len(first) and third == first


def test_undo_and_retry_go_back_a_question(hold, prompts_seen):
    """Greedy, so a question that is asked again gets the same prompt and the same answer."""
    _, err = hold("1+1", "2+2", "/retry", "/undo", "2+2", "/undo", "/undo", "/undo", "/retry", "3+3")
    first, second, again, third, last = prompts_seen
    assert second == again == third and len(last) == len(first) < len(second)
    assert err.count("forgotten: 2+2") == 2 and err.count("forgotten: 1+1") == 1
    assert "there is no question to forget" in err and "there is no question to answer again" in err


def test_retry_draws_another_answer_of_a_seed(hold, monkeypatch):
    seeds = []
    generate = Engine.generate

    def listen(self: Engine, prompt_ids: list[int], **options: Any) -> Iterator[Token]:
        seeds.append(options["seed"])
        return generate(self, prompt_ids, **options)

    monkeypatch.setattr(Engine, "generate", listen)
    hold("1+1", "/retry", more=("--seed", "5"))
    assert seeds == [5, 6]


def test_the_system_prompt_is_set_shown_kept_and_removed(hold, prompts_seen):
    lines = ("1+1", "/system", '/system ""', "/reset", "1+1", "/system Be brief.", "/reset", "1+1")
    _, err = hold(*lines, more=("--system", "Be brief."))
    first, plain, third = prompts_seen
    assert first == third and len(plain) < len(first)
    assert err.count("Be brief.") == 2 and "there is no system prompt" in err
    assert "a new conversation, with the same system prompt" in err


def test_a_conversation_is_saved_and_gone_on_with(hold, prompts_seen, tmp_path):
    file = tmp_path / "talk.json"
    hold("1+1", f"/save {file}", f"/save {file}", "2+2", more=("--system", "Be brief."))
    saved = json.loads(file.read_text())
    assert [turn["role"] for turn in saved["messages"]] == ["system", "user", "assistant"]
    _, err = hold(f"/load {file}", "2+2")
    assert prompts_seen[1] == prompts_seen[2] and "talk.json: 2 messages" in err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[]", "not a JSON object"),
        ("{", "not strict JSON"),
        ('{"messages": 3}', "messages: 3 must be a list; give a file that /save wrote"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "messages[0]:"),
        ('{"messages": [{"role": "user", "content": null}]}', "a content that is text"),
    ],
)
def test_what_is_no_conversation_is_neither_loaded_nor_overwritten(hold, prompts_seen, tmp_path, content, sentence):
    file = tmp_path / "other.json"
    file.write_text(content)
    _, err = hold("1+1", f"/load {file}", f"/save {file}", "/load", f"/load {tmp_path / 'nowhere'}", "2+2")
    assert sentence in err and "lies there and is no conversation; choose another name" in err
    assert "/load: which file? Write /load FILE" in err and "nowhere" in err
    assert file.read_text() == content
    assert len(prompts_seen[1]) > len(prompts_seen[0]), "the conversation goes on"


def test_stats_tell_of_the_last_answer(hold):
    _, err = hold("/stats", "1+1", "/stats", more=("--no-prerouter",))
    assert "nothing was answered yet" in err
    told = err[err.index("answer ") :].splitlines()
    assert [line.split()[0] for line in told[:6]] == ["answer", "prompt", "context", "reads", "waiting", "memory"]
    assert all(len(line) <= 60 for line in told) and "32 experts held" in told[5]
    assert re.search(r"prompt   \d+ tokens, 0 known; first token after", told[1])
    _, err = hold("1+1+2+2+3+3+4+4+5+5+6+6", "/retry", "/stats")
    assert int(re.search(r"tokens, (\d+) known", err)[1]) > 0


def test_json_gives_an_object_an_answer_and_nothing_else(hold, monkeypatch):
    out, _ = hold("1+1", "/help", "2+2", more=("--json",))
    first, second = (json.loads(line) for line in out.splitlines())
    assert second["prompt_ids"][: len(first["prompt_ids"])] == first["prompt_ids"]


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


def test_an_answer_stopped_before_its_first_word_is_no_turn(hold, prompts_seen, monkeypatch):
    prefill = Sequence.prefill

    def interrupted(self: Sequence, token_ids: list[int], *, last: bool) -> Any:
        if len(prompts_seen) == 1:
            signal.raise_signal(signal.SIGINT)
        return prefill(self, token_ids, last=last)

    monkeypatch.setattr(Sequence, "prefill", interrupted)
    _, err = hold("1+1", "1+1")
    assert prompts_seen[0] == prompts_seen[1] and "stopped before the first word" in err


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


class Terminal:
    """A conversation in a process on a terminal of so many columns."""

    def __init__(self, directory: Path, *options: str, columns: int = 80) -> None:
        self._parent, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        command = [sys.executable, "-m", "edge0_runtime", "chat", str(directory), *options]
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command, stdin=child, stdout=child, stderr=child, env=environment | {"TERM": "xterm"}
        )
        os.close(child)
        self.seen = b""

    def until(self, word: bytes) -> None:
        while word not in self.seen:
            assert select.select([self._parent], [], [], 60)[0], self.seen
            self.seen += os.read(self._parent, 4096)

    def type(self, text: bytes) -> None:
        os.write(self._parent, text)

    def end(self) -> None:
        self.type(b"/exit\r")
        assert self.process.wait(60) == 0
        os.close(self._parent)


def test_a_terminal_has_line_editing_tab_and_a_history(tiny_dir, tmp_path):
    """`/hlp`, two steps to the left, `e`: that is /help. `/und`, Tab: that is /undo. Up, up: /help again."""
    history = tmp_path / "history"
    terminal = Terminal(tiny_dir, "--history", str(history))
    terminal.until(b"> ")
    terminal.type(b"/hlp\x1b[D\x1b[De\r")
    terminal.until(b"/reset   forget the conversation")
    terminal.type(b"/und\t\r")
    terminal.until(b"there is no question to forget")
    terminal.seen = b""
    terminal.type(b"\x1b[A\x1b[A\r")
    terminal.until(b"/reset   forget the conversation")
    terminal.end()
    assert [line.strip() for line in history.read_text().splitlines()] == ["/help", "/undo", "/help", "/exit"]


def test_sixty_columns_are_enough(tiny_dir):
    terminal = Terminal(tiny_dir, "--max-tokens", "40", "--temperature", "0", "--seed", "1", columns=60)
    terminal.until(b"> ")
    for lines, word in ((b"/help\r", b"a space before it"), (b"1+1\r/stats\r", b"memory ")):
        terminal.type(lines)
        terminal.until(word)
    terminal.type(b"/load " + b"nowhere/" * 6 + b"\r")
    terminal.until(b"No such file")
    terminal.end()
    ours = terminal.seen.decode("utf-8", "replace").partition("Ctrl-D ends")[2].replace("\r", "").split("\n")
    assert all(len(line) <= 60 for line in ours if "nowhere" not in line and "\x1b" not in line), ours


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_lines_break_between_words_and_code_stays_as_it_is(size):
    text = (
        "one two three four five six seven\n"
        "    indented code is left as it is\n"
        "```\nfenced code that is wider than a line\n```\n"
        "averyveryverylongwordthatfitsnoline a b\n\nred \x1b[31m of\tit"
    )
    wrapping = Wrapping(16)
    shown = "".join(wrapping.add(text[at : at + size]) for at in range(0, len(text), size)) + wrapping.finish()
    assert shown.split("\n") == [
        "one two three", "four five six", "seven",
        "    indented code is left as it is",
        "```", "fenced code that is wider than a line", "```",
        "averyveryverylongwordthatfitsnoline", "a b", "", "red \\x1b[31m", "of\tit",
    ]  # fmt: skip
