"""What is inside of a checkpoint's folder: names, by their text, and links, which may stay in its hub cache entry.

huggingface_hub lays a repository out as …/models--ORG--NAME/snapshots/COMMIT/FILE, links into …/blobs of that entry.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_NAME_NBYTES = 255  # of a file, on every file system
_ENTRIES = ("models--", "datasets--", "spaces--")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # of what Git and LFS store


def is_name_inside(name: str, *, is_flat: bool = False, is_printable: bool = True, is_canonical: bool = True) -> bool:
    """Tell whether a name from an index or a listing is that of a file in a folder or below it, by its text alone.

    Args:
        name: The name, with "/" between its parts.
        is_flat: Refuse what lies below the folder.
        is_printable: Refuse backslashes and what cannot be printed; otherwise zero bytes alone.
        is_canonical: Refuse "." and empty parts, and parts that are too long for a file system.
    """
    try:
        parts = os.fsencode(name).split(b"/")
    except UnicodeEncodeError:  # half a surrogate pair
        return False
    if "\0" in name or (is_printable and ("\\" in name or not name.isprintable())):
        return False
    if not parts[0] or b".." in parts or (is_flat and len(parts) > 1):
        return False
    return not is_canonical or all(part not in (b"", b".") and len(part) <= MAX_NAME_NBYTES for part in parts)


class Roots:
    """The folders in which the files of a checkpoint may lie: its own, and the blobs of its hub cache entry.

    They are found once. A folder that is replaced by a link later, by whoever may do that, leads nowhere else then.
    The entry may lie behind a link. If its blobs do, files there count that are called by a hash, as blobs are: who
    does not know their bytes cannot name them.

    Attributes:
        folder: The checkpoint's own, as it was named.
        follow_links: Whether the user lets links lead anywhere; they are followed once, when a file is located.
    """

    __slots__ = ("_base", "_linked_blobs", "_real", "folder", "follow_links")

    def __init__(self, folder: Path, *, follow_links: bool = False) -> None:
        self.folder = folder
        self.follow_links = follow_links
        given, real = os.path.abspath(folder), os.path.realpath(folder)
        self._base = os.fspath(folder) if real == given else real  # below which nothing may be a link
        blobs = {*_find_blobs(given), *_find_blobs(real)}
        self._real = frozenset({Path(real), *(Path(path) for path in blobs if not os.path.islink(path))})
        self._linked_blobs = frozenset(os.path.realpath(path) for path in blobs if os.path.islink(path))

    def has(self, path: Path) -> bool:
        """Tell whether a path ends, all links followed, in one of the folders, or may end anywhere."""
        return self.follow_links or self._is_inside(path.resolve())

    def join(self, name: str) -> str:
        """Return the path of a file of the folder, on which the name alone may have links."""
        return os.path.join(self._base, name)

    def locate(self, name: str) -> str | None:
        """Return a path of a file of the folder on which nothing is a link; None if it ends outside of the folders.

        Whoever opens it without following links gets a file that lies inside, whatever became a link meanwhile.
        """
        path = self.join(name)
        if "/" not in name and not os.path.islink(path):
            return path
        real = os.path.realpath(path)
        return real if self.follow_links or self._is_inside(Path(real)) else None

    def _is_inside(self, real: Path) -> bool:
        if not self._real.isdisjoint(real.parents):
            return True
        return os.fspath(real.parent) in self._linked_blobs and _HASH.fullmatch(real.name) is not None


def _find_blobs(folder: str) -> Iterator[str]:
    """Yield the blobs of each hub cache entry in whose snapshots a folder lies; the last part alone may be a link."""
    for parent in Path(folder).parents:
        if parent.name == "snapshots" and parent.parent.name.startswith(_ENTRIES):
            yield os.path.join(os.path.realpath(parent.parent), "blobs")


def is_inside(path: Path, folder: Path) -> bool:
    """Tell whether a path ends, all links followed, in a folder or in the blobs of its hub cache entry."""
    return Roots(folder).has(path)
