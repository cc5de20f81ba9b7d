"""Turn what a user names, a path or a hub id, into a place that readers open: fetched, or for its headers alone."""

from __future__ import annotations

import logging
import os
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ftw.errors import SourceNotFoundError, printable
from ftw.hub import (
    HubId,
    HubPath,
    fetch_snapshot,
    http_errors,
    is_unreachable,
    list_repository,
    parse_hub_id,
    refusal,
    wait_to_retry,
)
from ftw.readers import GGUF_METADATA_NAME, FtwReader, SafetensorsReader, listed_files
from ftw.readers.gguf import GgufReader, choose_files

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ftw.hub import HubRepository

_log = logging.getLogger("ftw")

_NO_PATH = "path: does not exist, a file, a folder or a hub id is needed"
# What a conversion needs of a repository, in the folder that is meant and below it; weights of other kinds are never
# fetched, nor are GGUF files, of which a repository may hold many models, unless they were chosen. Of safetensors files
# those that the index or the name of the one says, or else all of the folder itself.
_METADATA_PATTERNS = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py", "*.md")
_WEIGHT_PATTERNS = ("*.safetensors", "*.ftw", f"*{GGUF_METADATA_NAME}")
_BELOW_PATTERN = "*/*.safetensors"
_GGUF_STRAYS = ["*mmproj*", "*imatrix*", "*mtp-*"]  # not needed for a GGUF model to be complete
_LISTING_WAITS = (1, 4)  # seconds: whoever waits for a listing sits before the screen


class _Patterns(NamedTuple):
    """What is fetched of a repository, and what of that is not."""

    wanted: list[str]
    unwanted: list[str]


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
    if isinstance(place, Path):
        return place
    patterns = _patterns_of(place.as_path(), place.inside)
    return fetch_snapshot(place.repository, named, *patterns) / named.inside


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
        raise SourceNotFoundError(f"{printable(name) or repr(name)}: {_NO_PATH}")
    return hub_id


_FILE_SUFFIXES = (".gguf", ".safetensors", ".json")


def _find_on_hub(hub_id: HubId) -> HubPath | Path:
    """Return a place on the hub; where that does not answer, or refuses, one in the local cache."""
    from huggingface_hub.errors import (
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RevisionNotFoundError,
    )

    try:
        place = HubPath(_list_repository(hub_id), hub_id.inside)
    except (HFValidationError, RevisionNotFoundError) as error:
        raise SourceNotFoundError(f"{hub_id}: hub id: {refusal(hub_id, error)}") from error
    except http_errors() as error:
        try:
            path = _find_in_cache(hub_id)
        except LocalEntryNotFoundError as cache_error:
            is_partial = hasattr(cache_error, "snapshot_path")  # huggingface_hub 2 knows what it should hold
            raise _not_found(hub_id, refusal(hub_id, error), is_partial=is_partial) from error
        if not isinstance(error, OfflineModeIsEnabled):
            _log.warning("%s: %s; what the local hub cache holds is taken", hub_id, refusal(hub_id, error))
        return path
    if not place.exists():
        problem = f"the repository has no such file or folder, at commit {place.repository.commit}"
        raise SourceNotFoundError(f"{hub_id}: hub id: {problem}")
    return place


def _list_repository(hub_id: HubId) -> HubRepository:
    """List a repository; a hub that is busy is asked again, one that cannot be reached is not."""
    tries = 1
    while True:
        try:
            return list_repository(hub_id)
        except http_errors() as error:
            if is_unreachable(error) or not wait_to_retry(str(hub_id), error, tries, _LISTING_WAITS):
                raise
            tries += 1


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
    elif _is_gguf(path):  # which model was fetched is not known any more
        snapshot(_below(hub_id.inside, ["*.gguf"]), _GGUF_STRAYS)
    else:
        snapshot(*_patterns_of(path, hub_id.inside))
    return path


def _patterns_of(path: Path, inside: str) -> _Patterns:
    """Return what is to be fetched: of one GGUF model its files alone, of another file its folder's metadata too.

    Args:
        path: Where it lies, on the hub or in the local cache.
        inside: The same within the repository.
    """
    is_folder = path.is_dir()
    folder = inside if is_folder else inside.rpartition("/")[0]
    weights, unwanted = list(_WEIGHT_PATTERNS), list[str]()
    if _is_gguf(path):
        weights = [escape(name) for name in choose_files(path).names]
        if not is_folder:
            return _Patterns(_below(folder, weights), [])
    elif not FtwReader.accepts(path) and SafetensorsReader.accepts(path):
        names = listed_files(path)
        if names is None:
            unwanted = [_BELOW_PATTERN]
        else:
            _check_all_there(path if is_folder else path.parent, names)
            weights = [escape(name) for name in names]
    return _Patterns(_below(folder, [*_METADATA_PATTERNS, *weights]), _below(folder, unwanted))


def _check_all_there(folder: Path, names: list[str]) -> None:
    """Check that the hub lists all of the files, before the first is fetched."""
    if isinstance(folder, HubPath):
        for name in names:
            _ = (folder / name).nbytes


def _is_gguf(path: Path) -> bool:
    return GgufReader.accepts(path) and not FtwReader.accepts(path)


def _below(folder: str, patterns: Iterable[str]) -> list[str]:
    """Return patterns for what lies in a folder of a repository, or below it."""
    prefix = f"{escape(folder)}/" if folder else ""
    return [prefix + pattern for pattern in patterns]
