"""Place: where a checkpoint lies, a file or a folder, on this machine or at one commit on the hub.

What lies beside a file that a user names is opened here alone, so that links are judged in one place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from ftw.errors import CheckpointError, printable
from ftw.files import Roots, WeightFile, read_json_file
from ftw.hub.path import HubPath
from ftw.hub.remote_file import HubFile, fetch_headers

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_WAY_OUT = "--follow-links (follow_links=True) allows links to anywhere"


class Place:
    """A file or a folder, and the files beside it.

    `follow_links` lets links in it lead anywhere.

    Attributes:
        path: The file or folder; on the hub a `HubPath`, which has the interface of a Path.
        is_folder: Whether it is a folder.
        folder: The folder itself, or the one that holds the file.
        roots: Where its files may lie, None on the hub.
    """

    __slots__ = ("_json", "folder", "is_folder", "path", "roots")

    def __init__(self, path: Path, *, follow_links: bool = False) -> None:
        self.path = path
        self.is_folder = path.is_dir()
        self.folder = path if self.is_folder else path.parent
        self.roots = None if isinstance(path, HubPath) else Roots(self.folder, follow_links=follow_links)
        self._json: dict[str, dict[str, Any] | None] = {}

    def open_file(self, name: str) -> WeightFile:
        """Open a weight file of the folder, which may lie elsewhere, by a link, only if the user allows that.

        Raises:
            CheckpointError: There is no such file, or it lies outside of the folder and of its hub cache entry.
        """
        path = self.folder / name
        if self.roots is None:
            return open_weight_file(path)
        real = self.roots.locate(name)
        file = WeightFile(path, real)  # what is missing is not called a link
        if real is None:
            found = f"is a link to '{printable(str(path.resolve()))}'"
            raise CheckpointError(path, "file", f"{found}, a file inside the checkpoint's folder is needed; {_WAY_OUT}")
        return file

    def open_files(self, names: Iterable[str], *, is_named: bool) -> tuple[WeightFile, ...]:
        """Open weight files as `open_file` does, and fetch the headers of those on the hub, several at a time.

        A file that the user named may be a link to anywhere.
        """
        files = tuple(open_weight_file(self.folder / name) if is_named else self.open_file(name) for name in names)
        fetch_headers([cast("HubFile", file) for file in files if isinstance(file, HubFile)])
        return files

    def leads_out(self, name: str) -> bool:
        """Tell whether a file of the folder is a link to something outside of it, and of its hub cache entry."""
        path = self.folder / name
        return self.roots is not None and path.is_symlink() and path.exists() and self.roots.locate(name) is None

    def locate(self, name: str) -> str | None:
        """Return where a file of the folder lies, a path on which nothing may be a link when it is opened.

        None if links may lead anywhere, since the user named it, and for the hub, which has none.

        Raises:
            CheckpointError: It leads out.
        """
        if self.roots is None or (not self.is_folder and name == self.path.name):
            return None
        if self.leads_out(name):
            problem = f"is a link that leads out of the folder; {_WAY_OUT}"
            raise CheckpointError(self.folder / name, "file", problem)
        return self.roots.locate(name) or self.roots.join(name)  # the latter of a link to nothing

    def describe(self, error: CheckpointError) -> str:
        """Return what an error about a file of the folder says, with the file's name alone."""
        return str(error).removeprefix(f"{printable(str(self.folder))}/")

    def has(self, name: str) -> bool:
        """Tell whether the folder holds a file; a link to nothing is a broken file, not a missing one."""
        path = self.folder / name
        return path.exists() or path.is_symlink()

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Return the JSON object in a small file of the folder, parsed once; None if there is no such file.

        Raises:
            CheckpointError: It is not a JSON object, or leads out of the folder.
        """
        if name not in self._json:
            # Mamba2-type models have an infinite upper bound in theirs, which Python writes as a bare Infinity.
            path = self.folder / name
            found = read_json_file(path, self.locate(name), allow_non_finite=True) if self.has(name) else None
            self._json[name] = found
        return self._json[name]


def open_weight_file(path: Path) -> WeightFile:
    """Return a file that holds weights, on this machine or on the hub.

    Raises:
        CheckpointError: There is no such file.
    """
    if not isinstance(path, HubPath):
        return WeightFile(path)
    nbytes = path.nbytes  # a name that the hub does not list is not looked for in the cache
    cached = path.find_cached() if nbytes else None
    return WeightFile(*cached) if cached else cast("WeightFile", HubFile(path))
