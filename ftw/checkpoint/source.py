"""A source, a path or a hub id, as a user names it, becomes a reader: located, found, fetched and opened."""

from __future__ import annotations

import logging
import os
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from ftw.checkpoint.layer_folders import find_layer_files
from ftw.errors import CheckpointError, FtwError, SourceNotFoundError, printable
from ftw.hub import (
    HubId,
    HubPath,
    Place,
    fetch_snapshot,
    http_errors,
    is_unreachable,
    list_repository,
    parse_hub_address,
    parse_hub_id,
    presentable,
    refusal,
    wait_to_retry,
)
from ftw.readers import GGUF_METADATA_NAME, STAGING_SUFFIX, find, open_found

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ftw.hub import HubRepository
    from ftw.readers import Found, Reader

_log = logging.getLogger("ftw")

_NO_PATH = "path: does not exist, a file, a folder or a hub id is needed"
_FILE_SUFFIXES = (".gguf", ".safetensors", ".json")
# What a conversion needs of a repository, in the folder that is meant and below it; weights of other kinds are never
# fetched, nor are GGUF files, of which a repository may hold many models, unless they were found. Of safetensors files
# those that the index or the name of the one says, or else all of the folder itself.
_METADATA_PATTERNS = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py", "*.md")
_WEIGHT_PATTERNS = ("*.safetensors", "*.ftw", f"*{GGUF_METADATA_NAME}")
_BELOW_PATTERN = "*/*.safetensors"
_GGUF_PATTERN = "*.gguf"
_GGUF_STRAYS = ("*mmproj*", "*imatrix*", "*mtp-*")  # not needed for a GGUF model to be complete
_LISTING_WAITS = (1, 4)  # seconds: whoever waits for a listing sits before the screen


class _Patterns(NamedTuple):
    """What is fetched of a repository, and what of that is not."""

    wanted: list[str]
    unwanted: list[str]


def open_source(source: str | os.PathLike[str], *, headers_only: bool, follow_links: bool = False) -> Reader:
    """Open what `source` names; of a hub id, fetch the checkpoint into huggingface_hub's cache, or its headers alone.

    Where the hub does not answer, or refuses, what its cache holds is opened. `follow_links` lets links in the folder
    lead anywhere.

    Raises:
        SourceNotFoundError: There is no such path, no such thing in the cache or on the hub, or no checkpoint in it.
        CheckpointError: A header or an index is broken, or a folder holds several checkpoints, and none is named.
    """
    named = _path_or_hub_id(source)
    if isinstance(named, Path):
        place = Place(named, follow_links=follow_links)
        return open_found(find(place), place)
    try:
        place = _find_on_hub(named)
    except http_errors() as error:
        found, place = _find_in_cache(named, error, follow_links=follow_links)
    else:
        found = find(place)
        if not headers_only:
            found, place = _fetch(found, place, follow_links=follow_links)
    return open_found(found, place)


def _path_or_hub_id(source: str | os.PathLike[str]) -> Path | HubId:
    path, name = Path(source), os.fspath(source)
    if name and path.exists():  # Path("") would be the current folder
        return path
    if name and (path.parent / f".{path.name}{STAGING_SUFFIX}").is_dir():
        problem = "path: is an unfinished conversion; resume=True with its source and this target ends it"
        raise SourceNotFoundError(f"{printable(name)}: {problem}", reason="unfinished")
    hub_id = parse_hub_id(name) or parse_hub_address(name) if isinstance(source, str) else None
    # Below a folder that is there, a name is a path with a slip in it, and not the hub's business.
    is_slip = (
        hub_id is not None and (Path(hub_id.repo_id).parent if not hub_id.inside else Path(hub_id.repo_id)).exists()
    )
    if hub_id is None or (is_slip and (hub_id.inside or name.endswith(_FILE_SUFFIXES))):
        raise SourceNotFoundError(f"{printable(name) or repr(name)}: {_NO_PATH}")
    return hub_id


def _find_on_hub(hub_id: HubId) -> Place:
    """Return a place on the hub, which was listed.

    Raises:
        SourceNotFoundError: There is no such repository, revision, file or folder.
        Exception: Any of `http_errors`: the hub does not answer, or refuses.
    """
    from huggingface_hub.errors import HFValidationError, RevisionNotFoundError

    try:
        path = HubPath(_list_repository(hub_id), hub_id.inside)
    except (HFValidationError, RevisionNotFoundError) as error:
        raise SourceNotFoundError(f"{hub_id}: hub id: {refusal(hub_id, error)}") from presentable(error)
    if not path.exists():
        problem = f"the repository has no such file or folder, at commit {path.repository.commit}"
        raise SourceNotFoundError(f"{hub_id}: hub id: {problem}")
    return Place(path.as_path())


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


def _find_in_cache(hub_id: HubId, error: Exception, *, follow_links: bool) -> tuple[Found, Place]:
    """Find a checkpoint in the local cache, since the hub could not be asked, which `error` says."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        found, place = _find_complete(hub_id, follow_links=follow_links)
    except LocalEntryNotFoundError as cache_error:
        is_partial = hasattr(cache_error, "snapshot_path")  # huggingface_hub 2 knows what it should hold
        raise _not_found(hub_id, refusal(hub_id, error), is_partial=is_partial) from presentable(error)
    if not isinstance(error, OfflineModeIsEnabled):
        _log.warning("%s: %s; what the local hub cache holds is taken", hub_id, refusal(hub_id, error))
    return found, place


def _find_complete(hub_id: HubId, *, follow_links: bool) -> tuple[Found, Place]:
    """Find a checkpoint in the cache, and check that all of it is there, as far as huggingface_hub can tell.

    Raises:
        LocalEntryNotFoundError: It is not.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError

    inside = hub_id.inside
    place = Place(_cached_snapshot(hub_id, [], []) / inside, follow_links=follow_links)
    if not place.path.exists():
        raise LocalEntryNotFoundError("not in the snapshot")
    try:
        found = find(place)
    except FtwError:  # perhaps since the cache holds only a part of it
        wanted = [escape(inside)] if not place.is_folder else _below(inside, [*_WEIGHT_PATTERNS, _GGUF_PATTERN])
        _cached_snapshot(hub_id, wanted, [*_GGUF_STRAYS])
        raise
    if not place.is_folder:
        _cached_snapshot(hub_id, [escape(inside)], [])
    elif found.format == "gguf":  # which model was fetched is not known any more
        _cached_snapshot(hub_id, _below(inside, [_GGUF_PATTERN]), [*_GGUF_STRAYS])
    else:
        _cached_snapshot(hub_id, *_patterns_of(found, place, inside))
    return found, place


def _cached_snapshot(hub_id: HubId, wanted: list[str], unwanted: list[str]) -> Path:
    """Return the snapshot in the cache, of which `wanted` is complete as far as huggingface_hub can tell."""
    from huggingface_hub import snapshot_download

    found = snapshot_download(
        hub_id.repo_id,
        revision=hub_id.revision,
        allow_patterns=wanted,
        ignore_patterns=unwanted,
        local_files_only=True,
    )
    return Path(found)


def _fetch(found: Found, place: Place, *, follow_links: bool) -> tuple[Found, Place]:
    """Fetch a checkpoint from the hub, and what a conversion needs besides; return it where it now lies."""
    path = cast("HubPath", place.path)
    for name in found.files:  # before the first is fetched
        if not (place.folder / name).is_file():
            raise CheckpointError(place.folder / name, "file", "is missing")
    hub_id = path.repository.hub_id._replace(inside=path.inside)
    snapshot = fetch_snapshot(path.repository, hub_id, *_patterns_of(found, place, path.inside))
    fetched = Place(snapshot / path.inside, follow_links=follow_links)
    left_out = tuple(entry for entry in found.left_out if fetched.has(entry.name))
    return found._replace(left_out=left_out), fetched


def _patterns_of(found: Found, place: Place, inside: str) -> _Patterns:
    """Return what is to be fetched: of one GGUF file, or set, its files alone, otherwise its folder's metadata too.

    Args:
        found: The checkpoint.
        place: Where it lies, on the hub or in the local cache.
        inside: The same within the repository.
    """
    folder = inside if place.is_folder else inside.rpartition("/")[0]
    weights = [escape(name) for name in found.files] if found.is_listed else [*_WEIGHT_PATTERNS]
    is_gguf_file = found.format == "gguf" and not place.is_folder
    wanted = weights if is_gguf_file else [*_METADATA_PATTERNS, *weights]
    layers, _ = find_layer_files(place)
    is_any_of_folder = found.format == "safetensors" and not found.is_listed and not layers
    wanted += [escape(name) for name in layers]
    return _Patterns(_below(folder, wanted), _below(folder, [_BELOW_PATTERN] if is_any_of_folder else []))


def _below(folder: str, patterns: Iterable[str]) -> list[str]:
    """Return patterns for what lies in a folder of a repository, or below it."""
    prefix = f"{escape(folder)}/" if folder else ""
    return [prefix + pattern for pattern in patterns]
