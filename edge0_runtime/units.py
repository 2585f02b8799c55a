"""Numbers for people: three figures and a unit; what was not measured is a dash."""

from __future__ import annotations

MISSING = "-"


def figures(value: float | None, unit: str = "") -> str:
    """Three significant figures, and never an exponent: 0.0123, 1.23, 1230."""
    if value is None or value != value:
        return MISSING
    if value == 0:
        return f"0{unit}"
    decimals = 0
    while decimals < 12 and abs(value) < 100 / 10**decimals:
        decimals += 1
    return f"{value:.{decimals}f}{unit}"


def share(value: float | None) -> str:
    """A share of 1 in per cent."""
    return MISSING if value is None or value != value else f"{100 * value:.0f} %"


def size(nbytes: float | None) -> str:
    """Bytes in the unit that suits them."""
    if nbytes is None or nbytes != nbytes:
        return MISSING
    unit = 0
    while nbytes >= 1000 and unit < len(_UNITS) - 1:
        nbytes, unit = nbytes / 1024, unit + 1
    return figures(nbytes, f" {_UNITS[unit]}") if unit else f"{nbytes:.0f} B"


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
