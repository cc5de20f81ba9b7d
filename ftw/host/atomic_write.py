"""Files and folders that are there after a power failure, whole or not at all."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def write_atomically(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file so that its name shows either the whole content or what was there before."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # a write does not know the name of its file
        temporary.unlink(missing_ok=True)
        error.filename = error.filename or str(path)
        raise
    temporary.replace(path)
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder last, if the system lets folders be opened: Windows does not."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
