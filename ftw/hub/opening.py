"""Opening weight files, on this machine or on the hub."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ftw.errors import CheckpointError, printable
from ftw.files import WeightFile, is_inside
from ftw.hub.path import HubPath
from ftw.hub.remote_file import HubFile, fetch_headers

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def open_weight_file(path: Path) -> WeightFile:
    """Return a file that holds weights, on this machine or on the hub.

    Raises:
        CheckpointError: There is no such file.
    """
    if not isinstance(path, HubPath):
        return WeightFile(path)
    nbytes = path.nbytes  # a name that the hub does not list is not looked for in the cache
    cached = path.find_cached() if nbytes else None
    return WeightFile(cached) if cached else cast("WeightFile", HubFile(path))


def open_named_file(folder: Path, name: str) -> WeightFile:
    """Return a file that an index names; unlike a file that a user names it may not lie elsewhere, by a link.

    Raises:
        CheckpointError: There is no such file, or it lies outside of the folder and of its hub cache entry.
    """
    path = folder / name
    file = open_weight_file(path)
    may_lead_out = not isinstance(path, HubPath) and ("/" in name or path.is_symlink())
    if may_lead_out and not is_inside(path, folder):
        problem = f"is a link to '{printable(str(path.resolve()))}', a file inside the checkpoint's folder is needed"
        raise CheckpointError(path, "file", problem)
    return file


def prefetch_headers(files: Iterable[WeightFile]) -> None:
    """Fetch the headers of those files that lie on the hub, several at a time, before they are read one by one."""
    fetch_headers([cast("HubFile", file) for file in files if isinstance(file, HubFile)])
