"""What the commands print: data on stdout; progress, warnings and errors on stderr, one line each."""

from __future__ import annotations

import json
import logging
import sys
from typing import TYPE_CHECKING, Any

from ftw.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH_OF_FILES = 1 << 16  # of a table that goes to a file or a pipe: names there are not cut into lines


def print_json(value: Any) -> None:
    """Print one JSON object, piece by piece.

    A character that stdout cannot show, or that would act on a terminal, becomes an escape of JSON.
    """
    for piece in json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(value):
        sys.stdout.write(piece if piece.isascii() and piece.isprintable() else _escaped(piece))
    print()


def _escaped(piece: str) -> str:
    """Return a piece of JSON, in which a line feed stands between two values alone, with escapes."""
    encoding = sys.stdout.encoding or "utf-8"
    return "".join(char if char == "\n" or _is_shown(char, encoding) else json.dumps(char)[1:-1] for char in piece)


def _is_shown(char: str, encoding: str) -> bool:
    try:
        char.encode(encoding)
    except UnicodeEncodeError:
        return False
    return char.isprintable()


def print_line(text: str) -> None:
    """Print one line of data; what it names is shown as it is, but for control characters."""
    print(printable(text))


def print_error(message: str) -> None:
    """Print an error, on one line."""
    print(f"ftw: error: {printable(' '.join(message.splitlines()))}", file=sys.stderr)


def print_warning(message: str) -> None:
    """Print a warning, on one line."""
    print(f"ftw: warning: {printable(' '.join(message.splitlines()))}", file=sys.stderr)


def make_console() -> Console:
    """Return a console on stdout, as wide as its terminal, to which brackets and colons in a name are just that."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDTH_OF_FILES
    return Console(width=width, highlight=False, markup=False, emoji=False)


class _WarningHandler(logging.Handler):
    """Prints what the library logs as warnings of the command's own."""

    def emit(self, record: logging.LogRecord) -> None:
        print_warning(record.getMessage())


def print_logged_warnings() -> None:
    """Print what the library logs from now on."""
    log = logging.getLogger("ftw")
    if not any(isinstance(handler, _WarningHandler) for handler in log.handlers):
        log.addHandler(_WarningHandler(logging.WARNING))
        log.propagate = False
