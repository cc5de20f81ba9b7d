"""What this process holds, to be compared by `<=` around what must leave nothing: what was there before may end.

An earlier test's connection, for one, ends when its thread next runs, which takes a while on a busy machine.
"""

import contextlib
import os
import threading
from pathlib import Path


def descriptors() -> set[tuple[int, int, int]]:
    """Return the open descriptors, each with the device and the inode of what it is open to."""
    found = set()
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # that of the listing itself
            status = os.fstat(number)
            found.add((number, status.st_dev, status.st_ino))
    return found


def mappings(folder: Path | str) -> set[str]:
    """Return the mappings of files below a folder, without their paths, which may lose their names meanwhile."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        return {line.partition(f" {folder}/")[0] for line in file if f" {folder}/" in line}


def holdings(folder: Path | str) -> set[object]:
    """Return descriptors, mappings of files below a folder, and threads."""
    return {*descriptors(), *mappings(folder), *threading.enumerate()}
