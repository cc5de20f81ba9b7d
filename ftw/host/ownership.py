"""Whose a file is, and what it lets others do. A system without user ids (Windows) has but one user here."""

from __future__ import annotations

import os
import stat

_GROUP_AND_OTHERS = 0o077


def is_own(status: os.stat_result) -> bool:
    """Tell whether a file is that of the user whom this process acts for."""
    return not hasattr(os, "geteuid") or status.st_uid == os.geteuid()


def granted(status: os.stat_result, group: int) -> int:
    """Return what a file's mode grants, of those bits that are for the group and for others.

    They are meant for a file of the group `group`. If that is another one, members of either are others at the other
    file, so nobody gets more than both have.
    """
    mode = stat.S_IMODE(status.st_mode) & _GROUP_AND_OTHERS
    if status.st_gid == group:
        return mode
    both = mode >> 3 & mode & 0o7
    return both << 3 | both
