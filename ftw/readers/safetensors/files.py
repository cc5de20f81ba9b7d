"""Which safetensors files of a folder make up a checkpoint: the first of these that is there.

transformers_weights        what config.json says under that key, a file or an index
model.safetensors           that file alone, as transformers takes it; unless an index names it and others that are
                            there, or config.json says that the folder is DF11, which has a file for each module
*.safetensors.index.json    the files that it names
otherwise                   every safetensors file but other copies and adapters; of numbered shards all

A file that holds one rank's part of each tensor is refused, since its tables lack rows: the parts have to be joined.
"""

from __future__ import annotations

import os
import re
from sys import getsizeof
from typing import TYPE_CHECKING, NamedTuple

from ftw.errors import CheckpointError, list_names, printable
from ftw.files import JsonStream, is_name_inside, open_json_file, short_repr
from ftw.readers.base import LeftOut
from ftw.readers.safetensors.names import find_ranks_part, is_of_a_rank, why_no_part, without_strays
from ftw.readers.tensor_budget import KEY_NBYTES, TensorBudget
from ftw.readers.weight_names import list_weight_files

if TYPE_CHECKING:
    from pathlib import Path

    from ftw.hub import Place

SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_VARIANT_INDEX = re.compile(r".+\.safetensors\.index\.[^.]+\.json", re.DOTALL)  # transformers' variant="fp16"
_PREFERRED = "model.safetensors.index.json"
WHOLE = "model.safetensors"
_CONFIG, _EXPLICIT = "config.json", "transformers_weights"
_PLACE_NBYTES = 60  # of a name of the index, beside itself
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.safetensors", re.DOTALL)
_MAX_NAMED = 3


class Index(NamedTuple):
    """An index: its file, the file that each tensor lies in, and the budget that these count against."""

    path: Path
    weight_map: dict[str, str]
    budget: TensorBudget


class Choice(NamedTuple):
    """Which files make up a checkpoint.

    Attributes:
        files: Their names, in order.
        is_listed: Whether an index, the user or a well-known name says so.
        listed_by: The index that counts, if one does.
        rival: An index that does not, of files that are all there too.
        left_out: Files beside them that are not taken.
        warnings: What was taken one way and could have been meant another.
    """

    files: list[str]
    is_listed: bool
    listed_by: Index | None = None
    rival: Index | None = None
    left_out: tuple[LeftOut, ...] = ()
    warnings: tuple[str, ...] = ()


def choose_files(place: Place) -> Choice | None:
    """Return the files of the checkpoint at a place; None if nothing there is called like one.

    Raises:
        CheckpointError: The index that counts is broken, there are several, numbered shards are missing, or a file is
            one rank's.
    """
    choice = _choose_of_folder(place) if place.is_folder else _choose_file(place)
    if choice is not None:
        _check_no_ranks_part(place, choice.files)
    return choice


def _choose_of_folder(place: Place) -> Choice | None:
    names, copies = list_weight_files(place, SUFFIX)
    indexes, _ = list_weight_files(place, _INDEX_SUFFIX)
    if not names and not indexes:
        return None
    choice = _choose_explicit(place) or _choose_whole(place, names, indexes) or _choose_listed(place, names, indexes)
    return choice._replace(left_out=(*_strays(names, choice), *copies))


def _choose_file(place: Place) -> Choice | None:
    """Return what a file that the user named is."""
    name = place.path.name
    if name.endswith(_INDEX_SUFFIX) or _VARIANT_INDEX.fullmatch(name):
        return _take_index(place, name)
    if not name.endswith(SUFFIX):
        return None
    match = _NUMBERED.fullmatch(name)
    if match and int(match["count"]) > 1:
        raise CheckpointError(place.path, "file", f"is one shard of {int(match['count'])}, open the folder instead")
    return Choice([name], is_listed=True)


def _choose_explicit(place: Place) -> Choice | None:
    """Return the file or the index that config.json names, as transformers takes it.

    Raises:
        CheckpointError: It is not there, or not inside of the folder.
    """
    name = (_read_config(place) or {}).get(_EXPLICIT)
    if not isinstance(name, str):
        return None
    if not _is_inside(name.removesuffix(".index.json")):
        needed = f"a path of a {SUFFIX} file or its index inside the checkpoint's folder is needed"
        raise CheckpointError(place.folder / _CONFIG, _EXPLICIT, f"file name {short_repr(name)}, {needed}")
    if not place.has(name):
        raise CheckpointError(place.folder / _CONFIG, _EXPLICIT, f"names {short_repr(name)}, which is not there")
    choice = _take_index(place, name) if name.endswith(_INDEX_SUFFIX) else Choice([name], is_listed=True)
    warning = f"{printable(name)} is taken, which {_CONFIG} names as {_EXPLICIT}; vLLM and SGLang do not look there"
    return choice._replace(warnings=(warning,))


def _choose_whole(place: Place, names: list[str], indexes: list[str]) -> Choice | None:
    """Return model.safetensors alone, if that is the checkpoint, and say so if an index speaks of others."""
    if WHOLE not in names or _is_df11(place):
        return None
    whole = Choice([WHOLE], is_listed=True)
    if _PREFERRED not in indexes:
        return whole
    taken = f"{WHOLE} is taken, as transformers does"
    try:
        index = _read_index(place, _PREFERRED)
    except CheckpointError as error:
        return whole._replace(warnings=(f"{taken}; the index beside it is not read: {place.describe(error)}",))
    files = set(index.weight_map.values())
    missing = sorted(name for name in files if not place.has(name))
    if missing:
        are = "is" if len(missing) == 1 else "are"
        problem = f"the index beside it names {list_names(missing, _MAX_NAMED)}, which {are} not there"
        return whole._replace(warnings=(f"{taken}; {problem}",))
    if WHOLE not in files:
        return whole._replace(rival=index)
    others = len(files) - 1
    warning = f"all {others + 1} files of the index are taken, as vLLM and SGLang do; transformers takes {WHOLE} alone"
    return _take(index)._replace(warnings=(warning,) if others else ())


def _choose_listed(place: Place, names: list[str], indexes: list[str]) -> Choice:
    """Return the files of the one index, or all that can be the model's."""
    if _PREFERRED in indexes:
        indexes = [_PREFERRED]
    if WHOLE not in names or indexes == [_PREFERRED]:
        if len(indexes) > 1:
            problem = f"there are several, {', '.join(map(printable, indexes))}; name one of them"
            raise CheckpointError(place.folder, "index", problem)
        if indexes:
            return _take_index(place, indexes[0])
    chosen = without_strays(names)
    _check_numbered(place.folder, chosen)
    return Choice(chosen, is_listed=False)


def _take_index(place: Place, name: str) -> Choice:
    return _take(_read_index(place, name))


def _take(index: Index) -> Choice:
    return Choice(sorted(set(index.weight_map.values())), is_listed=True, listed_by=index)


def _strays(names: list[str], choice: Choice) -> tuple[LeftOut, ...]:
    """Name the safetensors files of the folder that were not taken."""
    default = "the index does not name it" if choice.listed_by else f"{printable(choice.files[0])} is the checkpoint"
    left = sorted({*names} - {*choice.files})
    return tuple(LeftOut("file", name, why_no_part(name) or default) for name in left)


def _read_config(place: Place) -> dict[str, object] | None:
    return None if place.leads_out(_CONFIG) else place.read_json(_CONFIG)


def _is_df11(place: Place) -> bool:
    """Tell whether config.json says DF11: one file per compressed module, beside a model.safetensors with the rest."""
    return "dfloat11_config" in (_read_config(place) or {})


def _check_no_ranks_part(place: Place, names: list[str]) -> None:
    of_ranks = [name for name in names if is_of_a_rank(name)]
    part = of_ranks and find_ranks_part(of_ranks, (entry.name for entry in place.folder.iterdir()))
    if part:
        problem = "holds one rank's part of each tensor; join the parts of all ranks with the tool that wrote them"
        raise CheckpointError(place.folder / part, "file", problem)


def _check_numbered(folder: Path, names: list[str]) -> None:
    """Check that numbered shards without an index are all there."""
    present = set(names)
    sets = {(match["stem"], match["count"]): match[0] for match in filter(None, map(_NUMBERED.fullmatch, names))}
    for (stem, count), one in sets.items():
        for number in range(1, int(count) + 1):
            wanted = f"{stem}-{number:05}-of-{count}{SUFFIX}"
            if wanted not in present:
                raise CheckpointError(folder, wanted, f"is missing, {printable(one)} is there")


def _read_index(place: Place, name: str) -> Index:
    """Return which file each tensor lies in; of other members only that they are JSON matters."""
    path = place.path if not place.is_folder else place.folder / name
    index, found = Index(path, {}, TensorBudget()), "missing"
    with open_json_file(path, place.locate(name)) as file:
        index.budget.add_header(file.seek(0, os.SEEK_END), path)
        file.seek(0)
        stream = JsonStream(file.read, path, "json")
        for key in stream.iter_members():
            index.budget.take(KEY_NBYTES + getsizeof(key), path, "json")
            if key != "weight_map":
                stream.read_value()
            elif stream.kind() == "an object":
                _read_places(stream, index)
                found = "empty"
            else:
                found = stream.describe()
                break
        else:
            stream.finish()
    if not index.weight_map:
        raise CheckpointError(path, "weight_map", f"is {found}, an object of tensor and file names is needed")
    return index


def _read_places(stream: JsonStream, index: Index) -> None:
    path, weight_map, budget = index
    inside: dict[str, str] = {}  # of 100,000 names, those of a few thousand files are looked at, and kept once
    for name in stream.iter_members():
        budget.take(_PLACE_NBYTES + KEY_NBYTES + getsizeof(name), path, "weight_map")
        shard = stream.read_value()
        if isinstance(shard, str) and shard not in inside and _is_inside(shard):
            budget.take(2 * KEY_NBYTES + getsizeof(shard), path, "weight_map")
            inside[shard] = shard
        if not isinstance(shard, str) or shard not in inside:
            needed = f"a path of a {SUFFIX} file inside the checkpoint's folder is needed"
            raise CheckpointError(path, name, f"file name {short_repr(shard)}, {needed}")
        weight_map[name] = inside[shard]
    budget.give_back(KEY_NBYTES * len(weight_map))


def _is_inside(name: str) -> bool:
    return name.endswith(SUFFIX) and is_name_inside(name, is_canonical=False)
