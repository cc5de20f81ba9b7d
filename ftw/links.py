"""Links in a checkpoint's folder: which of them stay in it, or in the blobs of its hub cache entry.

huggingface_hub lays a repository out as …/snapshots/REVISION/FILE, links into …/blobs of the same entry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def stays_inside(path: Path, folder: Path) -> bool:
    """Tell whether a path ends, all links followed, in a folder or in the blobs of its hub cache entry."""
    root = folder.resolve()
    entries = [parent.parent for parent in root.parents if parent.name == "snapshots"]
    return not {root, *(entry / "blobs" for entry in entries)}.isdisjoint(path.resolve().parents)
