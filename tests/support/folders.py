"""What lies in a folder, to compare it before and after. Imports neither torch nor pytest, for `convert_trials`."""

import json
from pathlib import Path
from typing import Any


def tree(folder: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder, by name."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def state(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return inode, size and time of the last change of a folder and of all below it; no link is followed."""
    paths = [folder, *folder.rglob("*")]
    statuses = {path.relative_to(folder).as_posix(): path.lstat() for path in paths}
    return {name: (status.st_ino, status.st_size, status.st_mtime_ns) for name, status in statuses.items()}


def read_index(folder: Path) -> dict[str, Any]:
    """Return the index of an FTW folder."""
    index: dict[str, Any] = json.loads((folder / "freetoken_weight.json").read_bytes())
    return index
