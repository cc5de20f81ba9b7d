"""What is inside of a checkpoint's folder: names, by their text, and links, which may stay in its hub cache entry.

huggingface_hub lays a repository out as …/models--ORG--NAME/snapshots/COMMIT/FILE, links into …/blobs of that entry.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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


def is_outside(path: Path, folder: Path) -> bool:
    """Tell whether a path is a link to something that lies outside of a folder, and of its hub cache entry."""
    return path.is_symlink() and path.exists() and not is_inside(path, folder)


def is_inside(path: Path, folder: Path) -> bool:
    """Tell whether a path ends, all links followed, in a folder or in the blobs of its hub cache entry."""
    root = folder.resolve()
    snapshots = [parent for parent in root.parents if parent.name == "snapshots"]
    entries = [parent.parent for parent in snapshots if parent.parent.name.startswith(_ENTRIES)]
    return not {root, *(entry / "blobs" for entry in entries)}.isdisjoint(path.resolve().parents)
