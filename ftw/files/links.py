"""What is inside of a checkpoint's folder: names, by their text, and links, which may stay in its hub cache entry.

huggingface_hub lays a repository out as …/models--ORG--NAME/snapshots/COMMIT/FILE, links into …/blobs of that entry.
"""

from __future__ import annotations

import os
from pathlib import Path

MAX_NAME_NBYTES = 255  # of a file, on every file system
_ENTRIES = ("models--", "datasets--", "spaces--")


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

    Attributes:
        folder: The checkpoint's own, as it was named.
    """

    __slots__ = ("_base", "_real", "folder")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        real = os.path.realpath(folder)
        self._base = os.fspath(folder) if real == os.path.abspath(folder) else real  # below which nothing may be a link
        root = Path(real)
        snapshots = [parent for parent in root.parents if parent.name == "snapshots"]
        entries = [parent.parent for parent in snapshots if parent.parent.name.startswith(_ENTRIES)]
        self._real = frozenset({root, *(entry / "blobs" for entry in entries)})

    def has(self, path: Path) -> bool:
        """Tell whether a path ends, all links followed, in one of the folders."""
        return not self._real.isdisjoint(path.resolve().parents)

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
        return None if self._real.isdisjoint(Path(real).parents) else real


def is_inside(path: Path, folder: Path) -> bool:
    """Tell whether a path ends, all links followed, in a folder or in the blobs of its hub cache entry."""
    return Roots(folder).has(path)
