"""Fetching: the files of one commit of a repository, into huggingface_hub's cache.

    models--ORG--NAME/refs/REVISION             the commit that a branch or a tag is; written when all of it is there
    models--ORG--NAME/snapshots/COMMIT/PATH     a link to the blob
    models--ORG--NAME/blobs/ETAG                of a large file (LFS) the SHA-256 of its bytes

The commit is the one that was listed, whatever becomes of the branch meanwhile. A large file that is new is read once
more and compared with the SHA-256 that the hub lists: the right number of bytes are not yet the right bytes, after a
download that was resumed, or from a proxy.
"""

from __future__ import annotations

import hashlib
import logging
import os
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from ftw.errors import CheckpointError, SourceNotFoundError
from ftw.files import is_inside
from ftw.hub.errors import http_errors, refusal, wait_to_retry
from ftw.hub.redaction import presentable
from ftw.hub.session import bounded_session

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ftw.hub.ids import HubId
    from ftw.hub.repository import HubRepository

_log = logging.getLogger("ftw")

_HASH_CHUNK_NBYTES = 1 << 20
_MAX_HASHERS = 4  # threads; SHA-256 takes 2 GB/s of each


def fetch_snapshot(repository: HubRepository, hub_id: HubId, wanted: list[str], unwanted: list[str]) -> Path:
    """Fetch the files whose paths fit the patterns, and return the folder of the snapshot.

    What fails for a while is tried again, five times; a try that completed a file starts the count anew.

    Raises:
        SourceNotFoundError: They cannot be fetched, or are not what the hub lists.
        OSError: The cache cannot be written.
    """
    names = [name for name in repository.sizes if _fits(name, wanted) and not _fits(name, unwanted)]
    new, tries = _absent(repository, names), 1
    while True:
        before = len(new)
        _delete_overlong_parts(repository, new)
        found = _download(repository, wanted, unwanted)
        problem = _take_good(repository, new)  # after a failure too: the next fetch does not look at them again
        if isinstance(found, Path) and not problem:
            _note_revision(repository, found)
            return found
        error = OSError(problem) if isinstance(found, Path) else found
        tries = 1 if len(new) < before else tries
        if not wait_to_retry(str(hub_id), error, tries):
            problem = f"cannot be fetched: {refusal(hub_id, error)}"
            raise SourceNotFoundError(f"{hub_id}: hub id: {problem}") from presentable(error)
        tries += 1


def _download(repository: HubRepository, wanted: list[str], unwanted: list[str]) -> Path | BaseException:
    """Return the folder of the snapshot, or why it did not come; errors of the operating system are raised."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    failures: tuple[type[Exception], ...] = (*http_errors(), OSError, RuntimeError, ValueError)
    # RuntimeError is hf_xet's; ValueError that of a name that a second listing has and the first had not.
    repo_id, commit = repository.hub_id.repo_id, repository.commit
    try:
        with bounded_session():
            return Path(snapshot_download(repo_id, revision=commit, allow_patterns=wanted, ignore_patterns=unwanted))
    except LocalEntryNotFoundError as error:  # nothing in the cache either; the hub's error is its cause
        return error.__cause__ or error
    except failures as error:
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, http_errors()):
            raise
        return error


def _fits(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _absent(repository: HubRepository, names: Iterable[str]) -> set[str]:
    """Return which files the cache does not hold; one that is there in another size is deleted."""
    absent = set()
    for name in names:
        path = _find_cached(repository, name)
        if path and _has_other_size(repository, name, path):
            _delete(repository, path)
            path = None
        if path is None:
            absent.add(name)
    return absent


def _delete_overlong_parts(repository: HubRepository, new: Iterable[str]) -> None:
    """Delete parts of files that are longer than the file: huggingface_hub before 2 would continue them for ever."""
    for name in new:
        part = _entry(repository) / "blobs" / f"{repository.sha256s.get(name)}.incomplete"
        if part.is_file() and part.stat().st_size > (repository.sizes[name] or 0):
            part.unlink()


def _take_good(repository: HubRepository, new: set[str]) -> str:
    """Take those files out of `new` that came and are what the hub lists; return what is wrong with one of the others.

    Those that are not are deleted: huggingface_hub would take them for fetched.
    """
    from concurrent.futures import ThreadPoolExecutor

    problem, came = "", {}
    for name in sorted(new):
        path = _find_cached(repository, name)
        if path is None:
            problem = problem or f"{name} did not come"
        elif _has_other_size(repository, name, path):
            problem = f"{name} came with {path.stat().st_size} bytes, the hub lists {repository.sizes[name]}"
            _delete(repository, path)
        else:
            came[name] = path
    pool = ThreadPoolExecutor(_MAX_HASHERS, "ftw-sha256")
    try:
        digests = pool.map(_sha256, (path for name, path in came.items() if name in repository.sha256s))
        for name, path in came.items():
            listed = repository.sha256s.get(name)
            found = next(digests) if listed else None
            if found == listed:
                new.discard(name)
            else:
                problem = f"{name} came with SHA-256 {found}, the hub lists {listed}"
                _delete(repository, path)
    finally:
        pool.shutdown(cancel_futures=True)
    return problem


def _find_cached(repository: HubRepository, name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repository.hub_id.repo_id, name, revision=repository.commit)
    return Path(found) if isinstance(found, str) else None


def _has_other_size(repository: HubRepository, name: str, path: Path) -> bool:
    listed = repository.sizes[name]
    return listed is not None and path.stat().st_size != listed


def _sha256(path: Path) -> str:
    hasher, buffer = hashlib.sha256(), memoryview(bytearray(_HASH_CHUNK_NBYTES))
    with path.open("rb", buffering=0) as file:
        while nbytes := file.readinto(buffer):
            hasher.update(buffer[:nbytes])
    return hasher.hexdigest()


def _entry(repository: HubRepository) -> Path:
    """Return the folder of the cache that is the repository's."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE, f"models--{repository.hub_id.repo_id.replace('/', '--')}")


def _delete(repository: HubRepository, path: Path) -> None:
    """Delete a damaged file of a snapshot, and its blob.

    Raises:
        CheckpointError: It lies outside of the repository's folder of the cache, and of its blobs, or is a link there.
    """
    entry, blob = _entry(repository), path.resolve()
    snapshots = os.path.join(os.path.abspath(entry), "snapshots", "")
    is_inside_entry = is_inside(blob, entry) or blob.parent == (entry / "blobs").resolve()
    if not os.path.abspath(path).startswith(snapshots) or not is_inside_entry:
        raise CheckpointError(path, "file", f"is damaged, but not in {entry}; it is not deleted")
    blob.unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _note_revision(repository: HubRepository, snapshot: Path) -> None:
    """Write down which commit a branch or a tag is, for lookups without the hub, as huggingface_hub does.

    It does so only of a fetch by name, which might be one of a later commit than was listed.
    """
    from huggingface_hub import constants

    revision = repository.hub_id.revision or constants.DEFAULT_REVISION
    if revision == repository.commit:
        return
    ref = snapshot.parents[1] / "refs" / revision
    try:
        if ref.is_file() and ref.read_text() == repository.commit:
            return
        ref.parent.mkdir(parents=True, exist_ok=True)
        temporary = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
        temporary.write_text(repository.commit)
        temporary.replace(ref)
    except OSError as error:  # the files are there, if perhaps in a cache that is read-only
        _log.warning("%s: %s will not be found without the hub: %s", ref, repository.hub_id, error.strerror)
