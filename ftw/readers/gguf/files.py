"""Which GGUF files make up a checkpoint.

a file                      that file, or, if its name is NAME-00001-of-00003.gguf, the whole set that it belongs to
a folder                    the one file or set in it; projectors, importance matrices and drafts are left out
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ftw.errors import CheckpointError, printable
from ftw.readers.base import LeftOut
from ftw.readers.ftw_format import GGUF_METADATA_NAME

if TYPE_CHECKING:
    from pathlib import Path

    from ftw.hub import Place

_SUFFIX = ".gguf"
_SAFETENSORS_NAMES = ("model.safetensors", "model.safetensors.index.json")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
# Parts of a model, or facts about it, that lie beside its weights; by names in lower case.
_STRAYS = (
    (re.compile(r"mmproj|.*mmproj-", re.DOTALL), "a projector of images or sound, not the model"),
    (re.compile(r".*imatrix", re.DOTALL), "an importance matrix, not the model"),
    (re.compile(r"mtp-"), "a draft model for speculative decoding, not the model"),
)
_MAX_NAMED = 5


def choose_files(place: Place) -> tuple[list[str], tuple[LeftOut, ...]] | None:
    """Return the shards of the GGUF model at a place, and what is left out; None if names alone speak against one.

    A folder of safetensors holds none, nor does one whose only GGUF is the copy of metadata that an FTW has.

    Raises:
        CheckpointError: A shard is missing, or a folder holds several models.
    """
    if not place.is_folder:
        name = place.path.name
        return (_complete_set(place.folder, name), ()) if _is_gguf_name(name) else None
    names = _list_names(place.folder)
    if not names or any((place.folder / name).exists() for name in _SAFETENSORS_NAMES):
        return None
    strays = [LeftOut("file", name, reason) for name in names if (reason := _stray_reason(name))]
    stray_names = {stray.name for stray in strays}
    models = _group([name for name in names if name not in stray_names])
    if not models:
        models, strays = _group(names), []
    if len(models) != 1:
        found = ", ".join(map(printable, models[:_MAX_NAMED])) + (", …" if len(models) > _MAX_NAMED else "")
        raise CheckpointError(place.folder, "folder", f"holds {len(models)} GGUF models ({found}), name one of them")
    return _complete_set(place.folder, models[0]), tuple(strays)


def _is_gguf_name(name: str) -> bool:
    return name.lower().endswith(_SUFFIX)


def _list_names(folder: Path) -> list[str]:
    names = (entry.name for entry in folder.iterdir())
    return sorted(name for name in names if _is_gguf_name(name) and name != GGUF_METADATA_NAME)


def is_shard_name(name: str) -> bool:
    """Tell whether a file is one shard of several, by its name."""
    return _parse_shard(name) is not None


def _stray_reason(name: str) -> str | None:
    return next((reason for pattern, reason in _STRAYS if pattern.match(name.lower())), None)


def _group(names: list[str]) -> list[str]:
    """Return one name for each model among `names`."""
    models = {
        (match["stem"], match["count"]) if (match := _parse_shard(name)) else name: name for name in reversed(names)
    }
    return list(reversed(models.values()))


def _parse_shard(name: str) -> re.Match[str] | None:
    match = _SHARD.fullmatch(name)
    return match if match and 1 <= int(match["number"]) <= int(match["count"]) > 1 else None


def _complete_set(folder: Path, name: str) -> list[str]:
    """Return the names of all shards of the set that a file belongs to."""
    match = _parse_shard(name)
    if match is None:
        return [name]
    names = [
        f"{match['stem']}-{number:05}-of-{match['count']}{_SUFFIX}" for number in range(1, int(match["count"]) + 1)
    ]
    for number, wanted in enumerate(names, 1):
        if not (folder / wanted).exists():
            raise CheckpointError(folder / wanted, f"shard {number} of {len(names)}", "is missing")
    return names
