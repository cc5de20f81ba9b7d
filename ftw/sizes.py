"""Sizes as people write and read them, in binary units such as 8GiB, and rounded up to an alignment."""

from __future__ import annotations

import operator
import re

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)?", re.IGNORECASE | re.ASCII)
_MAX_DIGITS = 30  # more than any size has, and few enough for Python's integers


def parse_size(text: str) -> int:
    """Return the bytes that `text` names; "8GiB", "8G" and "8589934592" are the same.

    Raises:
        ValueError: It is not a size.
    """
    from fractions import Fraction  # imports decimal, which takes longer than any module of ftw

    match = _SIZE.fullmatch(text.strip())
    if not match or len(match[1]) > _MAX_DIGITS:
        raise ValueError(f"'{text}' is not a size, such as 8GiB or 512MiB")
    unit = (match[2] or "B").upper()
    exponent = "BKMGT".index(unit[0])
    return int(Fraction(match[1]) * 1024**exponent)


def parse_nbytes(subject: str, value: int | str | None, error: type[ValueError] = ValueError) -> int | None:
    """Return an argument that is given as bytes or as a size such as "8GiB", in bytes; None stays None.

    Raises:
        ValueError: It is neither. It is an `error`, and the message begins with the argument's name, `subject`.
    """
    if value is None:
        return None
    if isinstance(value, str):
        try:
            return parse_size(value)
        except ValueError as problem:
            raise error(f"{subject}: {problem}") from problem
    nbytes = whole_number(value)
    if nbytes is None or nbytes < 0:
        raise error(f"{subject}: {value!r} is neither bytes, 0 or more, nor a size, such as '8GiB'")
    return nbytes


def whole_number(value: object) -> int | None:
    """Return what Python takes for an index, a number of numpy too, as a number; None for all else, bools among it."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def format_size(nbytes: int) -> str:
    """Return `nbytes` in the unit that leaves one to four digits before the point."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value /= 1024
        unit += 1
    return f"{nbytes} B" if not unit else f"{value:.2f} {_UNITS[unit]}"


def count_of(number: int, thing: str) -> str:
    """Return "1 tensor", "2 tensors"."""
    return f"{number} {thing}{'s' * (number != 1)}"


def align_up(nbytes: int, alignment: int) -> int:
    """Round `nbytes` up to a multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment
