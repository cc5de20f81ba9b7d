"""Which GGUF files make up a checkpoint.

a file                      that file, or, if its name is NAME-00001-of-00003.gguf, the whole set that it belongs to
a folder                    the one file or set in it; projectors, importance matrices, adapters and drafts are left
                            out, known by their names, or where that leaves several, by what their metadata say
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ftw.errors import CheckpointError, printable
from ftw.readers.base import LeftOut
from ftw.readers.ftw_format import GGUF_METADATA_NAME
from ftw.readers.gguf.header import read_gguf_kinds
from ftw.readers.weight_names import list_weight_files

if TYPE_CHECKING:
    from pathlib import Path

    from ftw.hub import Place

_SUFFIX = ".gguf"
_SAFETENSORS_NAMES = ("model.safetensors", "model.safetensors.index.json")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
_PROJECTOR = "a projector of images or sound, not the model"
_MATRIX = "an importance matrix, not the model"
_DRAFT = "a draft model for speculative decoding, not the model"
_ADAPTER = "an adapter, not the model"
# Parts of a model, or facts about it, that lie beside its weights; by a word in their names, in lower case.
_STRAYS = (
    (re.compile(r"(.*[-_.])?mmproj([-_.0-9].*|)\.gguf", re.DOTALL), _PROJECTOR),
    (re.compile(r".*imatrix", re.DOTALL), _MATRIX),
    (re.compile(r"(.*[-_.])?mtp([-_.].*|)\.gguf", re.DOTALL), _DRAFT),
)
# The same by general.architecture, and by general.type.
_STRAY_KINDS = {
    "clip": _PROJECTOR,
    "mmproj": _PROJECTOR,
    "imatrix": _MATRIX,
    "adapter": _ADAPTER,
    "controlvector": "a control vector, not the model",
    "eagle3": _DRAFT,
    "dflash": _DRAFT,
}
_MAX_LOOKED_INTO = 8  # models of a folder, to know what they are
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
    listed, copies = list_weight_files(place, _SUFFIX)
    names = [name for name in listed if name != GGUF_METADATA_NAME]
    if not names or any((place.folder / name).is_file() for name in _SAFETENSORS_NAMES):
        return None
    reasons = {name: reason for name in names if (reason := _stray_reason(name))}
    models = _group([name for name in names if name not in reasons])
    if 1 < len(models) <= _MAX_LOOKED_INTO and place.roots is not None:  # on the hub names alone are looked at
        kinds = {_set_of(model): reason for model in models if (reason := _stray_kind(place, model))}
        if len(kinds) < len(models):
            models = [model for model in models if _set_of(model) not in kinds]
            reasons |= {name: kinds[_set_of(name)] for name in names if _set_of(name) in kinds}
    if not models:
        models, reasons = _group(names), {}
    if len(models) != 1:
        found = ", ".join(map(printable, models[:_MAX_NAMED])) + (", …" if len(models) > _MAX_NAMED else "")
        raise CheckpointError(place.folder, "folder", f"holds {len(models)} GGUF models ({found}), name one of them")
    strays = (LeftOut("file", name, reasons[name]) for name in sorted(reasons))
    return _complete_set(place.folder, models[0]), (*strays, *copies)


def _is_gguf_name(name: str) -> bool:
    return name.lower().endswith(_SUFFIX)


def is_shard_name(name: str) -> bool:
    """Tell whether a file is one shard of several, by its name."""
    return _parse_shard(name) is not None


def _stray_reason(name: str) -> str | None:
    return next((reason for pattern, reason in _STRAYS if pattern.match(name.lower())), None)


def _stray_kind(place: Place, name: str) -> str | None:
    """Return what a file is instead of a model, by its metadata; None if it is one, or broken."""
    try:
        kinds = read_gguf_kinds(place.open_file(name))
    except CheckpointError:  # said when it is opened
        return None
    return next((_STRAY_KINDS[kind] for kind in kinds if kind in _STRAY_KINDS), None)


def _group(names: list[str]) -> list[str]:
    """Return one name for each model among `names`."""
    return list(reversed({_set_of(name): name for name in reversed(names)}.values()))


def _set_of(name: str) -> tuple[str, str]:
    """Return what the names of all shards of a set have in common."""
    match = _parse_shard(name)
    return (match["stem"], match["count"]) if match else (name, "")


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
