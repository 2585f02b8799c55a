"""The command line of training in this process."""

from __future__ import annotations

import sys

import pytest

from edge0_train import cli


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """With what `python -m edge0_train <arguments>` ends."""
    monkeypatch.setattr(sys, "argv", ["edge0_train", *arguments])
    try:
        cli.main()
    except SystemExit as stop:
        return stop.code
    return 0
