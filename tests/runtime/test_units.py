"""Numbers that people read have three figures, a unit that suits them, and no `nan`, `None` or exponent."""

from __future__ import annotations

import re

import pytest

from edge0_runtime.cli import main
from edge0_runtime.units import figures, share, size


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0123456, "0.0123"), (1.23456, "1.23"), (12.3456, "12.3"), (123.456, "123"), (123456.7, "123457"),
     (-1.5, "-1.50"), (1e-30, "0.000000000000"), (None, "-"), (float("nan"), "-")],
)  # fmt: skip
def test_three_figures(value, text):
    assert figures(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.977 KiB"), (1536, "1.50 KiB"), (546_000, "533 KiB"), (2**30, "1.00 GiB"),
     (5 * 2**50, "5120 TiB"), (None, "-")],
)  # fmt: skip
def test_a_size_has_the_unit_that_suits_it(value, text):
    assert size(value) == text


def test_a_share_is_in_per_cent():
    assert (share(0.126), share(None), share(float("nan"))) == ("13 %", "-", "-")


UNREADABLE = re.compile(r"\bnan\b|None|\d\.\d{7}|\de[-+]\d|0\.00 GiB")


@pytest.mark.parametrize("tokens", ["1", "2", "4"])
@pytest.mark.parametrize("arms", [(), ("--arms", "on_demand,resident", "--rounds", "1")])
def test_bench_shows_no_unreadable_number(tiny_dir, capsys, tokens, arms):
    assert main(["bench", str(tiny_dir), "--prompt", "1+1", "--max-tokens", tokens, *arms]) == 0
    shown = capsys.readouterr()
    assert not UNREADABLE.search(shown.out + shown.err), shown.out + shown.err


def test_doctor_shows_no_unreadable_number(tiny_dir, capsys):
    assert main(["doctor", str(tiny_dir), "--read-mib", "0.01"]) == 0
    assert not UNREADABLE.search(capsys.readouterr().out)
