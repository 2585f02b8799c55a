"""What strangers wrote into a model directory is shown escaped and cut: a terminal obeys what it prints."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_runtime import serving
from edge0_runtime.cli import main
from edge0_runtime.contract.edge import run_command
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import printable, unquoted

EVIL = "\x1b]0;owned\x07\x1b[2J\u202e\r"
INDEX = "model.safetensors.index.json"


def escaped(text: str) -> bool:
    return all(character.isprintable() or character == "\n" for character in text)


@given(st.text(st.characters()), st.integers(2, 6), st.integers(10, 40))
def test_nothing_printable_is_lost_where_it_fits(text, lines, columns):
    shown = printable(text, lines, columns)
    assert escaped(shown) and len(shown.split("\n")) <= lines + 1
    if escaped(text) and len(text.split("\n")) <= lines and all(len(line) <= columns for line in text.split("\n")):
        assert shown == text


def test_of_a_long_error_the_beginning_and_the_fix_stay(capsys):
    def fail() -> None:
        raise Edge0Error("file: " + "y" * 2**22 + "; mend it\n" + "a problem\n" * 100_000 + "then run it again" + EVIL)

    assert run_command(fail, debug=False) == 2
    err = capsys.readouterr().err
    assert len(err) < 8000 and escaped(err)
    assert (
        err.startswith("error: file: yyy")
        and "; mend it\n" in err
        and "99,9" in err
        and "then run it again\\x1b]0" in err
    )


def test_a_long_unexpected_error_too(capsys):
    def fail() -> None:
        raise RuntimeError(EVIL * 10_000)

    assert run_command(fail, debug=False) == 3
    err = capsys.readouterr().err
    assert len(err) < 3000 and escaped(err)


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.fixture
def own_dir(tiny_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_dir, tmp_path / "model"))


def test_a_name_in_a_sentence_is_escaped_and_cut_without_quotes():
    assert unquoted("it's") == "it's"
    assert unquoted("a\x1b]0;b\n") == r"a\x1b]0;b\n"
    assert unquoted("x" * 300) == "x" * 200 + "..."


def test_inspect_shows_foreign_fields_escaped_and_cut(own_dir, capsys):
    config = json.loads((own_dir / "config.json").read_text())
    change(own_dir / "config.json", model_type=EVIL + "x" * 2**21, quantization=config["quantization"] | {EVIL: EVIL})
    assert main(["inspect", str(own_dir)]) == 0
    out = capsys.readouterr().out
    assert escaped(out) and len(out) < 20_000 and "\\x1b]0;owned" in out


def test_an_error_quotes_a_foreign_name_escaped_and_cut(own_dir, capsys):
    change(own_dir / INDEX, weight_map={EVIL + "t" * 2**20: EVIL})
    assert main(["inspect", str(own_dir)]) == 2
    err = capsys.readouterr().err
    assert escaped(err) and len(err) < 80_000 and "\\x1b]0;owned" in err


def test_a_logged_warning_is_escaped(own_dir, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own
    monkeypatch.setattr(serving, "check_binding", lambda *_: [f"a file from {EVIL}"])
    assert main(["generate", str(own_dir), "--prompt-ids", "5", "--max-tokens", "1"]) == 0
    assert "a file from \\x1b]0;owned" in capsys.readouterr().err
