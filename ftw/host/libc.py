"""Functions of the C library that Python does not offer, for systems that have them."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of renameat2(2), Linux 3.15


def exchange_names(one: Path, other: Path) -> bool:
    """Exchange two names in one step; return False if the C library or the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):  # no such function; no C library under that name, as on Windows
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)
