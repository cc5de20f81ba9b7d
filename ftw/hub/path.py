"""HubPath: a path in one repository on the hub, at one commit, with as much of pathlib's Path as the readers use.

A repository is listed once, with the sizes of its files; its folders are then known without a request. What lies in
the local hub cache at that commit is read from there, and every other file by ranges (`ftw.hub.remote_file`).

    org/name                     the repository, of its main branch
    org/name@revision            of another branch, a tag or a commit
    org/name/sub/file.gguf       a folder or a file of it; with a revision: org/name@revision/sub/file.gguf
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple, cast

from ftw.errors import CheckpointError, printable
from ftw.files import MAX_NBYTES, WeightFile, is_count, is_inside, short_repr
from ftw.hub.remote_file import HubFile, fetch_headers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import BinaryIO

_HUB_ID = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*)"  # "./name" is a path
    r"(?:@(?P<revision>refs/(?:pr|convert)/[\w.-]+|\w[\w.+-]*))?"
    r"(?P<inside>(?:/[^/]+)*)"
)
_LIST_TREE_FROM = 50_000  # files; the hub cuts the short listing of a larger repository
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_PART_NBYTES = 255  # of a name between slashes, by Linux
_MAX_KEPT_NBYTES = 1 << 20  # of one small file


class HubId(NamedTuple):
    """What a user names on the hub: a repository, perhaps one state of it, and perhaps a folder or a file in it."""

    repo_id: str
    revision: str | None
    inside: str

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        inside = f"/{self.inside}" if self.inside else ""
        return f"{self.repo_id}{revision}{inside}"


def parse_hub_id(text: str) -> HubId | None:
    """Return what `text` names on the hub; None if it cannot be there."""
    match = _HUB_ID.fullmatch(text)
    if match is None or not text.isprintable() or {".", ".."} & set(text.split("/")):
        return None
    return HubId(match["repo"], match["revision"], match["inside"].removeprefix("/"))


@dataclass(frozen=True, slots=True, eq=False)
class HubRepository:
    """One state of a repository.

    Attributes:
        hub_id: What the user named; nothing of it inside of the repository.
        commit: The commit that was listed, from which every file is read.
        sizes: Bytes of each file, by its path in the repository; None where the hub does not tell.
        folders: Names in each folder, by its path; the root's is empty.
        sha256s: SHA-256 of each large file (LFS), in hexadecimal, by path.
        contents: Small files that were fetched, by path: config.json is asked for more than once.
    """

    hub_id: HubId
    commit: str
    sizes: dict[str, int | None]
    folders: dict[str, list[str]]
    sha256s: dict[str, str] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict, repr=False)


def list_repository(hub_id: HubId) -> HubRepository:
    """Ask the hub for the files of a repository, by one request.

    Raises:
        HFValidationError: No repository can have such a name.
        CheckpointError: The listing names what cannot lie in a folder; names and hashes become paths of the cache.
        Exception: Any of `ftw.hub.errors.http_errors()`.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.hf_api import RepoFile

    api = HfApi()
    timeout = constants.HF_HUB_ETAG_TIMEOUT
    info = api.model_info(hub_id.repo_id, revision=hub_id.revision, files_metadata=True, timeout=timeout)
    root = hub_id._replace(inside="")
    if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
        problem = f"the hub lists the commit {short_repr(info.sha)}, 40 hexadecimal digits are needed"
        raise CheckpointError(str(root), "repository", problem)
    files = [(file.rfilename, file.size, file.lfs) for file in info.siblings or ()]
    if len(files) >= _LIST_TREE_FROM:
        tree = api.list_repo_tree(hub_id.repo_id, revision=info.sha, recursive=True)
        files = [(file.path, file.size, file.lfs) for file in tree if isinstance(file, RepoFile)]
    sha256s = {}
    for name, nbytes, lfs in files:
        _check_name(root, name)
        if nbytes is not None and not is_count(nbytes):
            raise _listing_error(root, name, f"of {short_repr(nbytes)} bytes, a number is needed")
        if lfs is not None:
            sha256s[name] = lfs.sha256
            if not isinstance(lfs.sha256, str) or not _SHA256.fullmatch(lfs.sha256):
                raise _listing_error(
                    root, name, f"of SHA-256 {short_repr(lfs.sha256)}, 64 hexadecimal digits are needed"
                )
    sizes = {name: nbytes for name, nbytes, _ in files}
    folders = _folders_of(sizes)
    both = next((name for name in sizes if name in folders), None)
    if both is not None:
        raise _listing_error(root, both, "and a folder of the same name")
    return HubRepository(root, info.sha, sizes, folders, sha256s)


def _check_name(root: HubId, name: str) -> None:
    """Check that a listed name is one of a file below the repository's folder, on this machine too."""
    parts = name.split("/")
    is_plain = name.isprintable() and "\\" not in name and not {"", ".", ".."} & set(parts)
    if not is_plain or any(len(part.encode()) > _MAX_PART_NBYTES for part in parts):
        raise _listing_error(root, name, "which cannot lie in a folder")


def _listing_error(root: HubId, name: str, problem: str) -> CheckpointError:
    return CheckpointError(str(root), "repository", f"the hub lists a file {short_repr(name)} {problem}")


def _folders_of(names: Iterable[str]) -> dict[str, list[str]]:
    folders: dict[str, dict[str, None]] = {"": {}}
    for name in names:
        while name:
            folder, _, last = name.rpartition("/")
            folders.setdefault(folder, {})[last] = None
            name = folder
    return {folder: list(entries) for folder, entries in folders.items()}


@dataclass(frozen=True, slots=True)
class HubPath:
    """A path in a repository, read-only, like the `Path` that it stands in for.

    It is no path of this machine, though it goes where a message takes one.
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
        """Return itself as what it stands in for: to readers, which need not tell the two apart."""
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
            return cached.open("rb")
        kept = self.repository.contents
        content = kept.get(self.inside)
        if content is None:
            buffer = bytearray(nbytes)
            HubFile(self).fetch_into(0, memoryview(buffer))
            content = bytes(buffer)
            if nbytes <= _MAX_KEPT_NBYTES:
                kept[self.inside] = content
        return io.BytesIO(content)

    def find_cached(self) -> Path | None:
        """Return where the local hub cache holds this file at this commit, None if it does not."""
        from huggingface_hub import try_to_load_from_cache

        repo_id, commit = self.repository.hub_id.repo_id, self.repository.commit
        found = try_to_load_from_cache(repo_id, self.inside, revision=commit)
        path = Path(found) if isinstance(found, str) else None
        return path if path and path.stat().st_size == self.nbytes else None


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


def prefetch(files: Iterable[WeightFile]) -> None:
    """Fetch the headers of those files that lie on the hub, several at a time, before they are read one by one."""
    fetch_headers([cast("HubFile", file) for file in files if isinstance(file, HubFile)])
