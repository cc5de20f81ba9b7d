"""Sizes as people write and read them: binary units, such as 8GiB."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)?", re.IGNORECASE | re.ASCII)
_MAX_DIGITS = 30  # more than any size has, and few enough for Python's integers


def parse_size(text: str) -> int:
    """Return the bytes that `text` names; "8GiB", "8G" and "8589934592" are the same.

    Raises:
        ValueError: It is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match or len(match[1]) > _MAX_DIGITS:
        raise ValueError(f"'{text}' is not a size, such as 8GiB or 512MiB")
    unit = (match[2] or "B").upper()
    exponent = "BKMGT".index(unit[0])
    return int(Fraction(match[1]) * 1024**exponent)


def format_size(nbytes: int) -> str:
    """Return `nbytes` in the unit that leaves one to four digits before the point."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value /= 1024
        unit += 1
    return f"{nbytes} B" if not unit else f"{value:.2f} {_UNITS[unit]}"
