"""What the commands print: data on stdout; progress, warnings and errors on stderr, one line each."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ftw.errors import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

_WIDTH_OF_FILES = 100  # of a table that goes to a file or a pipe, which has no terminal to fit


def print_json(value: Any) -> None:
    """Print one JSON object, in ASCII where stdout cannot show its text: a name may hold bytes that are no UTF-8."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=2)
    print(text)


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


@contextmanager
def progress_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that takes bytes done and all bytes.

    A bar appears on stderr after a second, and only where that is a terminal.
    """
    from tqdm import tqdm

    bar = tqdm(desc=description, unit="B", unit_scale=True, unit_divisor=1024, delay=1, disable=None, leave=False)

    def update(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    with bar:
        yield update
