"""The start of a segment's reaper, the process that removes its name when all who used it are gone."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import TYPE_CHECKING

from ftw.errors import printable

if TYPE_CHECKING:
    from pathlib import Path

_START_SECONDS = 20  # it takes 0.02; the rest is for a loaded machine

_log = logging.getLogger("ftw")


def start_reaper(descriptor: int, path: Path, *, own_lock: bytes, users_lock: bytes) -> None:
    """Start the reaper of an open segment, and return once it holds nothing of this process.

    Where that fails, a warning tells so: the last user to close the segment still removes the name.

    Args:
        descriptor: The segment.
        path: The name that it has, or will get.
        own_lock: `struct flock` that a reaper holds.
        users_lock: The one that is free when nobody uses the segment.
    """
    problem = _run(descriptor, path, own_lock, users_lock)
    if problem:
        name = printable(str(path))
        _log.warning("%s: no reaper, so the name stays if all its users are killed: %s", name, problem)


def _run(descriptor: int, path: Path, own_lock: bytes, users_lock: bytes) -> str | None:
    """Run the program up to where it goes on by itself; return what went wrong."""
    if not sys.executable or getattr(sys, "frozen", False):  # a frozen program would be started a second time
        return "there is no Python interpreter to run it"
    from ftw.host.shared import reaper_program  # Windows lacks what it imports

    program = [sys.executable, "-I", "-S", reaper_program.__file__]
    try:
        result = subprocess.run(  # noqa: S603 - this interpreter, and a file of our own
            [*program, str(descriptor), str(path), own_lock.hex(), users_lock.hex()],
            pass_fds=(descriptor,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what the terminal sends to our process group is not for it
            cwd="/",
            timeout=_START_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return printable(str(error))
    return None if result.stdout == reaper_program.READY else f"it ended with status {result.returncode}"
