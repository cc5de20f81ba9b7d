"""What the commands print: data on stdout; progress, warnings and errors on stderr, one line each.

What a message of the library advises is in Python's words; here it gets those of the command line.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ftw.errors import FtwError, in_command_words, printable

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH_OF_FILES = 1 << 16  # of a table that goes to a file or a pipe: names there are not cut into lines
_log = logging.getLogger("ftw")


def _set_quiet(is_quiet: bool) -> bool:
    """Let warnings through or not, as long as this command runs."""
    _log.setLevel(logging.ERROR if is_quiet else logging.NOTSET)
    return is_quiet


QuietOption = Annotated[
    bool,
    typer.Option("--quiet", "-q", callback=_set_quiet, help="Print errors alone, and with --json its object."),
]


class ClosedStream(io.TextIOBase):
    """Stands for a stdout that was closed before the start: what is written there fails, as it does in other tools.

    `nowhere` keeps the number of its descriptor, which a file would get otherwise.
    """

    def __init__(self, nowhere: io.TextIOBase) -> None:
        self._nowhere = nowhere

    def write(self, _: str) -> int:
        """Fail, as the system does."""
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), "stdout")


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
    """Print one line of data; what it names is shown as it is, but for control characters.

    On a terminal that is too narrow it goes on in the next one, at a blank: no number and no name is torn apart.
    """
    text = printable(text)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else len(text)
    if len(text) <= width:
        print(text)
        return
    own = text[: len(text) - len(text.lstrip())]
    lines = textwrap.wrap(
        text, max(width, 20), subsequent_indent=f"{own}  ", break_long_words=False, break_on_hyphens=False
    )
    print("\n".join(lines))


def print_command(purpose: str, command: str) -> None:
    """Print what to type, on a line of its own where the terminal is too narrow, so that it can be copied."""
    is_narrow = sys.stdout.isatty() and len(purpose) + len(command) + 2 > shutil.get_terminal_size().columns
    print(f"{purpose}:{chr(10) if is_narrow else ' '}{printable(command)}")


def print_error(message: str) -> None:
    """Print an error, on one line."""
    with contextlib.suppress(OSError), _line_of_its_own():  # whoever reads stderr has left; the exit status tells it
        print(f"ftw: error: {_one_line(message)}", file=sys.stderr, flush=True)


def describe_failure(message: str, error: BaseException | None = None) -> dict[str, str | None]:
    """Return what JSON says of a failure: the line on stderr, without its beginning, and of whom it speaks."""
    reason, subject = (error.reason, error.subject) if isinstance(error, FtwError) else (None, None)
    if isinstance(error, OSError) and subject is None and isinstance(error.filename, str):
        subject = error.filename
    return {"error": _one_line(message), "reason": reason, "subject": subject}


def print_warning(message: str) -> None:
    """Print a warning, on one line, unless the command is to be quiet."""
    if _log.isEnabledFor(logging.WARNING):
        with _line_of_its_own():
            print(f"ftw: warning: {_one_line(message)}", file=sys.stderr)


def _line_of_its_own() -> contextlib.AbstractContextManager[None]:
    """Clear the line of a progress bar, if there is one on the terminal, and show it again below."""
    tqdm = sys.modules.get("tqdm")
    if tqdm is None or not sys.stderr.isatty():
        return contextlib.nullcontext()
    bars: contextlib.AbstractContextManager[None] = tqdm.tqdm.external_write_mode(file=sys.stderr)
    return bars


def _one_line(message: str) -> str:
    return printable(in_command_words(" ".join(message.splitlines())))


def make_console() -> Console:
    """Return a console on stdout, as wide as its terminal, to which brackets and colons in a name are just that."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDTH_OF_FILES
    colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"  # without, bold is none either
    return Console(width=width, color_system=colours, highlight=False, markup=False, emoji=False)


class _WarningHandler(logging.Handler):
    """Prints what the library logs as warnings of the command's own."""

    def emit(self, record: logging.LogRecord) -> None:
        print_warning(record.getMessage())


def print_logged_warnings() -> None:
    """Print what the library logs from now on."""
    if not any(isinstance(handler, _WarningHandler) for handler in _log.handlers):
        _log.addHandler(_WarningHandler(logging.WARNING))
        _log.propagate = False
