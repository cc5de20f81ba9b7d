"""Python programs that a benchmark runs in processes of their own."""

from __future__ import annotations

import sys

# Python looks for the modules of a program that comes by `-c` in the current folder first, which may be a stranger's.
_FORGET_FOLDER = "import sys; sys.path[:] = filter(None, sys.path)\n"


def python_command(program: str, *arguments: str) -> list[str]:
    """Return the command that runs a program, with the arguments in `sys.argv[1:]`."""
    return [sys.executable, "-c", _FORGET_FOLDER + program, *arguments]


def module_command(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a module; -P, of Python 3.11, leaves the current folder out of the search."""
    return [sys.executable, "-P", "-m", name, *arguments]
