"""Turn what a user names, a path or a hub id, into a place that readers open: fetched, or for its headers alone."""

from __future__ import annotations

import os
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

from ftw.errors import SourceNotFoundError, printable
from ftw.hub import HubId, HubPath, list_repository, parse_hub_id
from ftw.hub_errors import http_errors, refusal
from ftw.readers._gguf_files import choose_files
from ftw.readers.ftw import GGUF_METADATA_NAME, FtwReader
from ftw.readers.gguf import GgufReader

if TYPE_CHECKING:
    from collections.abc import Iterable

_NO_PATH = "path: does not exist, a file, a folder or a hub id is needed"
# What a conversion needs of a repository, in the folder that is meant and below it; weights of other kinds are never
# fetched, nor are GGUF files, of which a repository may hold many models, unless they were chosen.
_METADATA_PATTERNS = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py", "*.md")
_SUFFIX = ".safetensors"
_WEIGHT_PATTERNS = (f"*{_SUFFIX}", "*.ftw", f"*{GGUF_METADATA_NAME}")
_GGUF_STRAYS = ["*mmproj*", "*imatrix*", "*mtp-*"]  # not needed for a GGUF model to be complete


def resolve_source(source: str | os.PathLike[str]) -> Path:
    """Return the local file or folder that `source` names; a hub id is fetched into huggingface_hub's cache.

    Of a repository of GGUF files that one model is fetched which it holds, or which `source` names.

    Raises:
        SourceNotFoundError: There is no such path, and no such thing in the cache or on the hub.
        CheckpointError: A repository holds several GGUF models, and none is named.
    """
    named = _path_or_hub_id(source)
    if isinstance(named, Path):
        return named
    place = _find_on_hub(named)
    return place if isinstance(place, Path) else _fetch(named, _patterns_of(place))


def locate_source(source: str | os.PathLike[str]) -> Path:
    """Return the file or folder that `source` names, to read headers alone; of a hub id nothing is fetched.

    Where the hub can be reached, that is a `HubPath` in the guise of the `Path` that it stands in for; where not, the
    snapshot in huggingface_hub's cache.

    Raises:
        SourceNotFoundError: There is no such path, and no such thing in the cache or on the hub.
    """
    named = _path_or_hub_id(source)
    place = named if isinstance(named, Path) else _find_on_hub(named)
    return place if isinstance(place, Path) else place.as_path()


def _path_or_hub_id(source: str | os.PathLike[str]) -> Path | HubId:
    path, name = Path(source), os.fspath(source)
    if name and path.exists():  # Path("") would be the current folder
        return path
    hub_id = parse_hub_id(name) if isinstance(source, str) else None
    # Below a folder that is there, a name is a path with a slip in it, and not the hub's business.
    is_slip = (
        hub_id is not None and (Path(hub_id.repo_id).parent if not hub_id.inside else Path(hub_id.repo_id)).exists()
    )
    if hub_id is None or (is_slip and (hub_id.inside or name.endswith(_FILE_SUFFIXES))):
        raise SourceNotFoundError(f"{printable(name)}: {_NO_PATH}")
    return hub_id


_FILE_SUFFIXES = (".gguf", ".safetensors", ".json")


def _find_on_hub(hub_id: HubId) -> HubPath | Path:
    """Return a place on the hub; where that does not answer, or refuses, one in the local cache."""
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RevisionNotFoundError

    try:
        place = HubPath(list_repository(hub_id), hub_id.inside)
    except (HFValidationError, RevisionNotFoundError) as error:
        raise SourceNotFoundError(f"{hub_id}: hub id: {refusal(hub_id, error)}") from error
    except http_errors() as error:
        try:
            return _find_in_cache(hub_id)
        except LocalEntryNotFoundError as cache_error:
            is_partial = hasattr(cache_error, "snapshot_path")  # huggingface_hub 2 knows what it should hold
            raise _not_found(hub_id, refusal(hub_id, error), is_partial=is_partial) from error
    if not place.exists():
        problem = f"the repository has no such file or folder, at commit {place.repository.commit}"
        raise SourceNotFoundError(f"{hub_id}: hub id: {problem}")
    return place


def _not_found(hub_id: HubId, reason: str, *, is_partial: bool) -> SourceNotFoundError:
    if is_partial:
        problem = f"hub id: the local hub cache holds only a part of it, and {reason}"
    elif hub_id.inside:
        problem = f"{_NO_PATH}; it is not in the local hub cache, and for {hub_id.repo_id}, {reason}"
    else:
        problem = f"hub id: is neither a path nor in the local hub cache, and {reason}"
    return SourceNotFoundError(f"{hub_id}: {problem}")


def _find_in_cache(hub_id: HubId) -> Path:
    """Return a place in the local cache, and check that all of it is there, as far as huggingface_hub can tell."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot(wanted: list[str], unwanted: list[str] | None = None) -> Path:
        found = snapshot_download(
            hub_id.repo_id,
            revision=hub_id.revision,
            allow_patterns=wanted,
            ignore_patterns=unwanted,
            local_files_only=True,
        )
        return Path(found)

    path = snapshot([]) / hub_id.inside
    if not path.exists():
        raise LocalEntryNotFoundError("not in the snapshot")
    if not path.is_dir():
        snapshot([escape(hub_id.inside)])
    elif _is_gguf(path):
        snapshot(_below(hub_id.inside, ["*.gguf"]), _GGUF_STRAYS)
    else:
        snapshot(_below(hub_id.inside, [*_METADATA_PATTERNS, *_WEIGHT_PATTERNS]))
    return path


def _fetch(hub_id: HubId, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    failures: tuple[type[Exception], ...] = (LocalEntryNotFoundError, *http_errors())
    try:
        snapshot = snapshot_download(hub_id.repo_id, revision=hub_id.revision, allow_patterns=patterns)
    except failures as error:
        cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else None
        reason = refusal(hub_id, cause or error)
        raise SourceNotFoundError(f"{hub_id}: hub id: cannot be fetched: {reason}") from error
    return Path(snapshot, hub_id.inside)


def _patterns_of(place: HubPath) -> list[str]:
    """Return what is to be fetched: of one GGUF model its files alone, of another file its folder's metadata too."""
    is_folder = place.is_dir()
    folder = place.inside if is_folder else place.parent.inside
    weights: list[str] = list(_WEIGHT_PATTERNS)
    if _is_gguf(place.as_path()):
        weights = [escape(name) for name in choose_files(place.as_path()).names]
        if not is_folder:
            return _below(folder, weights)
    elif place.name.endswith(_SUFFIX):
        weights = [escape(place.name)]
    return _below(folder, [*_METADATA_PATTERNS, *weights])


def _is_gguf(path: Path) -> bool:
    return GgufReader.accepts(path) and not FtwReader.accepts(path)


def _below(folder: str, patterns: Iterable[str]) -> list[str]:
    """Return patterns for what lies in a folder of a repository, or below it."""
    prefix = f"{escape(folder)}/" if folder else ""
    return [prefix + pattern for pattern in patterns]
