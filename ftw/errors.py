"""Everything that ftw raises on purpose.

    FtwError
    ├── CheckpointError     (ValueError)         a file is not what its format says
    ├── SourceNotFoundError (FileNotFoundError)  no checkpoint under that path or hub id
    ├── UnknownTensorError  (KeyError)           the checkpoint has no tensor of that name
    ├── NotEligibleError    (ValueError)         a table may not leave the GPU
    ├── OutputError         (OSError)            the target may not or cannot be written
    ├── LookupArgumentError (ValueError)         ids or tables that a lookup cannot take
    ├── DeviceError         (RuntimeError)       torch has no such device
    ├── PinError            (MemoryError)        host memory for a table is not there, or not page-locked by the driver
    ├── SharedMemoryError   (OSError)            a table's shared memory holds something else, or cannot be made
    └── ClosedError         (ValueError)         a checkpoint or a model was used after its close

A message is one line: ``path: subject: what was found, what is allowed``. Errors of the operating system pass through.
What it advises is in Python's words, ``overwrite=True``; `in_command_words` turns these into the command line's.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Arguments of the library that are options of the command line. A message may have both, as "--x (x=True)".
_OPTIONS = "embed|overwrite|resume|decode_df11|layout|follow_links|sha256|vram_bytes|reserve_bytes"
_VALUE = r"(?:True|'[^']*'|\"[^\"]*\")"
_ARGUMENT = re.compile(rf"\b(?P<name>{_OPTIONS})=(?P<value>{_VALUE}(?: or {_VALUE})*)")
_BOTH = re.compile(rf"(?P<option>--[a-z][a-z0-9-]*(?: [\w|]+)?) \((?P<argument>(?:{_OPTIONS})={_VALUE})\)")
_QUOTES = re.compile("['\"]")
_COMMAND_NAMES = {"vram_bytes": "--vram", "reserve_bytes": "--reserve"}

_MAX_SHOWN = 4096  # a path may be as long as that, a tensor's name from a hostile file longer


class FtwError(Exception):
    """Base of all errors that ftw raises on purpose.

    Attributes:
        reason: A word for programs, such as a verdict's; None if the class says all.
        subject: The table, tensor, file or part of one that it is about; None if the message alone names it.
    """

    reason: str | None = None
    subject: str | None = None

    __str__ = Exception.__str__  # KeyError's own would print the repr of the message


class CheckpointError(FtwError, ValueError):
    """A file is not what its format says.

    Args:
        path: The file.
        subject: The part of it, such as ``header`` or a tensor's name.
        problem: What was found and what is allowed.
    """

    subject: str

    def __init__(self, path: str | os.PathLike[str], subject: str, problem: str) -> None:
        self.path = os.fspath(path)
        self.subject = subject
        super().__init__(f"{printable(self.path)}: {printable(subject)}: {problem}")

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        problem = str(self).removeprefix(f"{printable(self.path)}: {printable(self.subject)}: ")
        return type(self), (self.path, self.subject, problem)


class SourceNotFoundError(FtwError, FileNotFoundError):
    """No checkpoint lies under that path or hub id; `reason` may say what lies there instead."""

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        self.reason = reason
        super().__init__(message)


class UnknownTensorError(FtwError, KeyError):
    """The checkpoint has no tensor of that name."""


class NotEligibleError(FtwError, ValueError):
    """A table may not leave the GPU; the message names it and the reason, as `subject` and `reason` do for programs."""

    def __init__(self, message: str, *, reason: str | None = None, subject: str | None = None) -> None:
        self.reason = reason
        self.subject = subject
        super().__init__(message)


class OutputError(FtwError, OSError):
    """The target of a conversion may not or cannot be written."""


class LookupArgumentError(FtwError, ValueError):
    """Ids, a table or an output tensor that a lookup cannot take."""


class DeviceError(FtwError, RuntimeError):
    """There is no device of that name."""


class PinError(FtwError, MemoryError):
    """Host memory for a table is not there, or the driver refused to page-lock it."""


class SharedMemoryError(FtwError, OSError):
    """The memory that processes share a table in holds something else, or cannot be made."""


class ClosedError(FtwError, ValueError):
    """A checkpoint or a model was used after its close."""


def printable(text: str) -> str:
    """Return `text` for a message of one line: control characters escaped, and cut where it is endless."""
    if len(text) > _MAX_SHOWN:
        text = f"{text[: _MAX_SHOWN // 2]}…{text[-_MAX_SHOWN // 2 :]}"
    return text if text.isprintable() else ascii(text)[1:-1]


def list_names(names: Sequence[str], most: int) -> str:
    """Return the first `most` names for a message, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(printable, names[:most])) + more


def in_python_words(message: str) -> str:
    """Return a message with what it advises as Python's arguments alone: "--x (x=True)" becomes "x=True"."""
    return _BOTH.sub(lambda match: match["argument"], message)


def in_command_words(message: str) -> str:
    """Return a message with what it advises as options: "overwrite=True" becomes "--overwrite"."""
    return _ARGUMENT.sub(_option, _BOTH.sub(lambda match: match["option"], message))


def _option(match: re.Match[str]) -> str:
    option = _COMMAND_NAMES.get(match["name"]) or f"--{match['name'].replace('_', '-')}"
    return option if match["value"] == "True" else f"{option} {_QUOTES.sub('', match['value'])}"
