"""Whose a file is, and what it lets others do. A system without user ids (Windows) has but one user here."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

from ftw.errors import printable

if TYPE_CHECKING:
    from pathlib import Path

_GROUP_AND_OTHERS = 0o077
_ROOT = 0
_ACCESS_LIST = "system.posix_acl_access"


def is_own(status: os.stat_result) -> bool:
    """Tell whether a file is that of the user whom this process acts for."""
    return not hasattr(os, "geteuid") or status.st_uid == os.geteuid()


def is_own_or_roots(status: os.stat_result) -> bool:
    """Tell whether a file is one's own, or the administrator's, who may change everything anyway."""
    return is_own(status) or status.st_uid == _ROOT


def owner_of(status: os.stat_result) -> str:
    """Return whose a file is, as a message says it: "uid 1001 (alice)"."""
    try:
        import pwd  # Windows lacks it

        return f"uid {status.st_uid} ({printable(pwd.getpwuid(status.st_uid).pw_name)})"
    except (ImportError, KeyError):  # a user of another machine, or one who is gone
        return f"uid {status.st_uid}"


def granted(status: os.stat_result, group: int) -> int:
    """Return what a file's mode grants, of those bits that are for the group and for others.

    They are meant for a file of the group `group`. If that is another one, members of either are others at the other
    file, so nobody gets more than both have.
    """
    mode = stat.S_IMODE(status.st_mode) & _GROUP_AND_OTHERS
    return mode if status.st_gid == group else _least(mode)


def granted_by(file: Path | int, group: int) -> int:
    """Return what `granted` does, of a file by its path or its descriptor; links are followed.

    Where it has an access control list, what its mode says of its group is the most that anybody on the list may do.
    The group then gets what others get, if the mode says no less of it.
    """
    mode = granted(os.stat(file), group)
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or no list
        os.getxattr(file, _ACCESS_LIST)
        return _least(mode)
    return mode


def _least(mode: int) -> int:
    both = mode >> 3 & mode & 0o7
    return both << 3 | both
