"""Links in a checkpoint's folder: which of them stay in it, or in the blobs of its hub cache entry.

huggingface_hub lays a repository out as …/models--ORG--NAME/snapshots/COMMIT/FILE, links into …/blobs of that entry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


_ENTRIES = ("models--", "datasets--", "spaces--")


def is_outside(path: Path, folder: Path) -> bool:
    """Tell whether a path is a link to something that lies outside of a folder, and of its hub cache entry."""
    return path.is_symlink() and path.exists() and not is_inside(path, folder)


def is_inside(path: Path, folder: Path) -> bool:
    """Tell whether a path ends, all links followed, in a folder or in the blobs of its hub cache entry."""
    root = folder.resolve()
    snapshots = [parent for parent in root.parents if parent.name == "snapshots"]
    entries = [parent.parent for parent in snapshots if parent.parent.name.startswith(_ENTRIES)]
    return not {root, *(entry / "blobs" for entry in entries)}.isdisjoint(path.resolve().parents)
