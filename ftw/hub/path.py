"""HubPath: a path in one commit of a repository, with as much of pathlib's Path as the readers use.

Folders are known by the listing, without a request. What the local hub cache holds of that commit is read from there,
every other file by ranges (`ftw.hub.remote_file`).
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, cast

from ftw.errors import CheckpointError
from ftw.files import MAX_NBYTES, Roots, open_plain_file
from ftw.hub.remote_file import HubFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from ftw.hub.repository import HubRepository

_MAX_KEPT_NBYTES = 1 << 20  # of one small file


@dataclass(frozen=True, slots=True)
class HubPath:
    """A path in a repository, read-only, like the `Path` that it stands in for.

    It is not a path of this machine, but a message takes it as one.
    """

    repository: HubRepository
    inside: str = ""

    def __str__(self) -> str:
        return str(self.repository.hub_id._replace(inside=self.inside))

    def __fspath__(self) -> str:
        return str(self)

    def __lt__(self, other: HubPath) -> bool:
        return self.inside < other.inside

    def __truediv__(self, name: str) -> HubPath:
        inside = str(PurePosixPath(self.inside, name))
        return HubPath(self.repository, "" if inside == "." else inside)

    def as_path(self) -> Path:
        """Return itself as what it stands in for: to readers, which need not distinguish the two."""
        return cast("Path", self)

    @property
    def name(self) -> str:
        """Last part of the path."""
        return PurePosixPath(self.inside or self.repository.hub_id.repo_id).name

    @property
    def parent(self) -> HubPath:
        """Folder that holds it; the root's is the root."""
        return HubPath(self.repository, self.inside.rpartition("/")[0])

    @property
    def nbytes(self) -> int:
        """Bytes of the file.

        Raises:
            CheckpointError: There is none.
        """
        nbytes = self.repository.sizes.get(self.inside)
        if nbytes is not None:
            return nbytes
        if self.is_file():
            raise CheckpointError(self, "file", "the hub does not tell its size")
        raise CheckpointError(self, "file", "is not a regular file" if self.is_dir() else "is missing")

    @property
    def url(self) -> str:
        """Address of the file at the commit."""
        from huggingface_hub import constants, hf_hub_url

        repo_id, commit = self.repository.hub_id.repo_id, self.repository.commit
        return hf_hub_url(repo_id, self.inside, revision=commit, endpoint=constants.ENDPOINT)

    def is_file(self) -> bool:
        """Tell whether it is a file."""
        return self.inside in self.repository.sizes

    def is_dir(self) -> bool:
        """Tell whether it is a folder."""
        return self.inside in self.repository.folders

    def exists(self) -> bool:
        """Tell whether it is a file or a folder."""
        return self.is_file() or self.is_dir()

    def is_symlink(self) -> bool:
        """Return False: the hub has none."""
        return False

    def iterdir(self) -> Iterator[HubPath]:
        """Yield what lies in the folder."""
        return (self / name for name in self.repository.folders[self.inside])

    def glob(self, pattern: str) -> Iterator[HubPath]:
        """Yield what lies in the folder itself and has a name that fits the pattern."""
        return (path for path in self.iterdir() if fnmatchcase(path.name, pattern))

    def open(self, mode: str) -> BinaryIO:
        """Open a small file for reading; it is fetched whole.

        Raises:
            ValueError: The mode is not "rb".
            CheckpointError: It is larger than 100 MB, or `HubFile` cannot read it.
        """
        if mode != "rb":
            raise ValueError(f"mode '{mode}': only 'rb' is allowed")
        nbytes = self.nbytes
        if nbytes > MAX_NBYTES:
            raise CheckpointError(self, "file", f"is {nbytes} bytes long, at most {MAX_NBYTES} are fetched whole")
        cached = self.find_cached()
        if cached is not None:
            return open_plain_file(*cached)
        kept = self.repository.contents
        content = kept.get(self.inside)
        if content is None:
            buffer = bytearray(nbytes)
            HubFile(self).fetch_into(0, memoryview(buffer))
            content = bytes(buffer)
            if nbytes <= _MAX_KEPT_NBYTES:
                kept[self.inside] = content
        return io.BytesIO(content)

    def find_cached(self) -> tuple[Path, str] | None:
        """Return where the local hub cache holds this file at this commit, and the same without links.

        None if it does not, or holds a link that leads out of the repository's entry.
        """
        from huggingface_hub import try_to_load_from_cache

        repo_id, commit = self.repository.hub_id.repo_id, self.repository.commit
        found = try_to_load_from_cache(repo_id, self.inside, revision=commit)
        if not isinstance(found, str) or os.stat(found).st_size != self.nbytes:
            return None
        path = Path(found)
        real = Roots(path.parents[self.inside.count("/")]).locate(self.inside)
        return (path, real) if real else None
