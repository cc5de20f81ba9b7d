"""What strangers may have put at a target, or on the way to it: other users but the administrator, who may do anything.

A target's name can be foreseen, and in a folder that everybody may write to anybody may be faster.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from ftw.errors import OutputError, printable
from ftw.host import OpenFolder, is_own_or_roots, owner_of

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_LINKS = 40  # on the way to a target, as the kernel has it


def find_stranger(folder: Path, names: Iterable[str]) -> str | None:
    """Return which stranger owns a folder or files of these names in it, in words, None if none does."""
    for path in (folder, *(folder / name for name in names)):
        with contextlib.suppress(OSError):  # it is not there
            status = path.lstat()
            if not is_own_or_roots(status) and not _is_owner_here(status, folder.parent):
                return f"{printable(str(path))} belongs to {owner_of(status)}"
    return None


def check_new_parent(folder: Path, target: Path) -> None:
    """Check a folder above a target that was not there a moment ago, and is not this process's.

    Raises:
        OutputError: A stranger has made it, or it is not a folder.
    """
    status = folder.lstat()
    if not is_own_or_roots(status):
        problem = f"was just made and belongs to {owner_of(status)}, which is not trusted"
    elif not stat.S_ISDIR(status.st_mode):
        problem = "was just made and is not a folder"
    else:
        return
    raise OutputError(f"{printable(str(target))}: target: {printable(str(folder))} {problem}")


def follow_links(path: Path) -> Path:
    """Return a path without its links, as far as it is there; the result of a loop is a link.

    A link in a folder that everybody may write to is followed only if it is one's own, the administrator's or of the
    folder's owner, as Linux does in /tmp (protected_symlinks, which a path without links no longer meets). A system
    without user ids follows all.

    Raises:
        OutputError: A link is anybody else's.
    """
    if not hasattr(os, "geteuid"):
        return Path(os.path.realpath(path))
    place, num_links = Path(path.anchor), 0
    pending = list(reversed(path.parts[1:]))
    while pending:
        name = pending.pop()
        step = place.parent if name == ".." else place / name
        if not os.path.islink(step):
            place = step
            continue
        _check_link(step)
        num_links += 1
        if num_links > _MAX_LINKS:
            return step
        content = Path(os.readlink(step))
        pending += reversed(content.parts[1:] if content.is_absolute() else content.parts)
        place = Path(content.anchor) if content.is_absolute() else place
    return place


def _check_link(link: Path) -> None:
    status, folder = link.lstat(), link.parent.stat()
    is_the_folders = status.st_uid == folder.st_uid
    if folder.st_mode & stat.S_IWOTH and not is_the_folders and not is_own_or_roots(status):
        found = f"is a link that belongs to {owner_of(status)}, in a folder that everybody may write to"
        raise OutputError(f"{printable(str(link))}: target: {found}; name a folder of your own")


def _is_owner_here(status: os.stat_result, parent: Path) -> bool:
    """Tell whether all that this process makes in a folder belongs to the same user, as on some network shares."""
    with OpenFolder(parent) as opened:
        made = opened.status_of_private_file()
    return made is not None and made.st_uid == status.st_uid
