"""HubRepository: one commit of a repository, listed once with the sizes of its files, and checked."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftw.errors import CheckpointError
from ftw.files import is_count, is_name_inside, short_repr
from ftw.hub.redaction import check_endpoint
from ftw.hub.session import bounded_session

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ftw.hub.ids import HubId

_LIST_TREE_FROM = 50_000  # files; the hub cuts the short listing of a larger repository
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, eq=False)
class HubRepository:
    """One state of a repository.

    Attributes:
        hub_id: What the user named; nothing of it inside of the repository.
        commit: The commit that was listed, from which every file is read.
        sizes: Bytes of each file, by its path in the repository; None if the hub does not say.
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
        SourceNotFoundError: The hub's address is none.
        Exception: Any of `ftw.hub.errors.http_errors()`.
    """
    check_endpoint(hub_id)
    with bounded_session():
        return _list_repository(hub_id)


def _list_repository(hub_id: HubId) -> HubRepository:
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
        if not is_name_inside(name):
            raise _listing_error(root, name, "which cannot lie in a folder")
        if nbytes is not None and not is_count(nbytes):
            raise _listing_error(root, name, f"of {short_repr(nbytes)} bytes, a number is needed")
        if lfs is not None:
            sha256s[name] = lfs.sha256
            if not isinstance(lfs.sha256, str) or not _SHA256.fullmatch(lfs.sha256):
                found = f"of SHA-256 {short_repr(lfs.sha256)}"
                raise _listing_error(root, name, f"{found}, 64 hexadecimal digits are needed")
    sizes = {name: nbytes for name, nbytes, _ in files}
    folders = _folders_of(sizes)
    both = next((name for name in sizes if name in folders), None)
    if both is not None:
        raise _listing_error(root, both, "and a folder of the same name")
    return HubRepository(root, info.sha, sizes, folders, sha256s)


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
