"""SafetensorsReader: a Hugging Face checkpoint, in one file or in shards.

Which files of a folder make up the checkpoint, in this order:

    *.safetensors.index.json   the shards that it names; every other safetensors file is left out
    model.safetensors          that file alone, unless config.json says that the folder is DF11, which has no index
    otherwise                  every safetensors file but adapters and copies of the weights; of numbered shards all

A file that holds one rank's part of each tensor is refused, since its tables lack rows: the parts have to be joined.
"""

from __future__ import annotations

import os
import re
from functools import partial
from sys import getsizeof
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from ftw.errors import CheckpointError, printable
from ftw.files import JsonStream, is_name_inside, open_json_file, short_repr
from ftw.readers.base import DerivedFile, Found, LeftOut
from ftw.readers.safetensors_header import read_safetensors_header
from ftw.readers.safetensors_names import find_ranks_part, is_of_a_rank, why_no_part, without_strays
from ftw.readers.tensor_budget import KEY_NBYTES, TensorBudget
from ftw.tensors import Extent

if TYPE_CHECKING:
    from pathlib import Path

    from ftw.hub import Place
    from ftw.tensors import TensorInfo

_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_PREFERRED = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_PLACE_NBYTES = 60  # of a name of the index, beside itself
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.safetensors")


class Index(NamedTuple):
    """An index: its file, the file that each tensor lies in, and the budget that these count against."""

    path: Path
    weight_map: dict[str, str]
    budget: TensorBudget


class SafetensorsReader:
    """A safetensors checkpoint; see `ftw.readers.base.Reader` for its attributes."""

    format: ClassVar[str] = "safetensors"

    def __init__(self, place: Place, found: Found, *, index: Index | None) -> None:
        self.place = place
        self.files = place.open_files(found.files, is_named=index is None and len(found.files) == 1)
        self.tensors: dict[str, TensorInfo] = {}
        self.metadata: dict[str, str] = {}
        self._file_of_shard = {name: number for number, name in enumerate(found.files)}
        left_out: list[LeftOut] = []
        placed, budget = (index.weight_map, index.budget) if index else ({}, TensorBudget())
        reasons: dict[str, str] = {}  # one text for all stale copies that have the same
        for name, file in zip(found.files, self.files, strict=True):
            header = read_safetensors_header(file, name, budget)
            self.metadata.update(header.metadata)
            for tensor in header.tensors.values():
                if tensor.name not in self.tensors and placed.get(tensor.name, name) == name:
                    self.tensors[tensor.name] = tensor
                else:
                    left_out.append(self._stale_copy(tensor, placed, reasons, budget))
        if index:
            self._check_weight_map(index)
        self.left_out = (*left_out, *found.left_out)
        self.warnings: tuple[str, ...] = ()
        self.problems: tuple[CheckpointError, ...] = ()

    @staticmethod
    def find(place: Place) -> Found | None:
        """Return the files that an index names, or else those that are named like a checkpoint's.

        Raises:
            CheckpointError: The index is broken, there are several, or numbered shards are missing.
        """
        names = sorted(entry.name for entry in place.folder.iterdir()) if place.is_folder else [place.path.name]
        present = [name for name in names if name.endswith(_SUFFIX)]
        indexes = [name for name in names if name.endswith(_INDEX_SUFFIX)]
        if not present and not indexes:
            return None
        path = _choose_index(place, indexes)
        index = _read_index(path, place.locate(path.name)) if path else None
        chosen = sorted(set(index.weight_map.values())) if index else _choose_files(place, present)
        _check_no_ranks_part(place, chosen)
        is_listed = index is not None or chosen == [_WHOLE] or not place.is_folder
        reader, strays = partial(SafetensorsReader, index=index), _strays(present, chosen, index)
        return Found(SafetensorsReader.format, reader, tuple(chosen), is_listed, strays)

    def extents(self, tensor: TensorInfo) -> tuple[Extent, ...]:
        """Return where the bytes of one of `tensors` lie: always one run."""
        return (Extent(self._file_of_shard[tensor.shard], tensor.offset, tensor.nbytes),)

    def block_order(self, tensor: TensorInfo) -> None:
        """Return None: the format is little-endian."""

    def gguf_metadata(self) -> None:
        """Return None: it has nothing of a GGUF's."""

    def derived_files(self) -> tuple[DerivedFile, ...]:
        """Return nothing: all that is not a weight lies in files of its own."""
        return ()

    def _stale_copy(
        self, tensor: TensorInfo, weight_map: dict[str, str], reasons: dict[str, str], budget: TensorBudget
    ) -> LeftOut:
        """Return why a tensor is not taken: the index names another file for it."""
        if weight_map.get(tensor.name, tensor.shard) == tensor.shard:
            other = self.tensors[tensor.name].shard
            problem = f"lies in {printable(other)} too, and no index says which one counts"
            raise CheckpointError(self.place.folder / tensor.shard, tensor.name, problem)
        reason = f"a copy in {printable(tensor.shard)}, the index names {printable(weight_map[tensor.name])}"
        if reason not in reasons:
            budget.take(getsizeof(reason) + KEY_NBYTES, self.place.folder / tensor.shard, "header")
        return LeftOut("tensor", tensor.name, reasons.setdefault(reason, reason))

    def _check_weight_map(self, index: Index) -> None:
        for name, shard in index.weight_map.items():
            if name not in self.tensors:
                problem = f"the index places it in '{shard}', which has no such tensor"
                raise CheckpointError(index.path, name, problem)


def _choose_index(place: Place, names: list[str]) -> Path | None:
    """Return the index among the files of that kind that are there, None if the weights count without one."""
    folder = place.folder
    if not place.is_folder:
        return place.path if names else None
    if (folder / _PREFERRED).exists():
        names = [_PREFERRED]
    elif (folder / _WHOLE).exists():
        return None
    if len(names) > 1:
        problem = f"there are several, {', '.join(map(printable, names))}; name one of them"
        raise CheckpointError(folder, "index", problem)
    return folder / names[0] if names else None


def _read_index(path: Path, real: str | None) -> Index:
    """Return which file each tensor lies in; of other members only that they are JSON matters.

    `real` is where the index lies, without links; None follows them to anywhere.
    """
    index, found = Index(path, {}, TensorBudget()), "missing"
    with open_json_file(path, real) as file:
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
            needed = f"a path of a {_SUFFIX} file inside the checkpoint's folder is needed"
            raise CheckpointError(path, name, f"file name {short_repr(shard)}, {needed}")
        weight_map[name] = inside[shard]
    budget.give_back(KEY_NBYTES * len(weight_map))


def _is_inside(name: str) -> bool:
    return name.endswith(_SUFFIX) and is_name_inside(name, is_canonical=False)


def _choose_files(place: Place, names: list[str]) -> list[str]:
    """Return the names of the files that make up a checkpoint without an index, out of those that are there."""
    if not place.is_folder:
        match = _NUMBERED.fullmatch(names[0])
        if match and int(match["count"]) > 1:
            raise CheckpointError(place.path, "file", f"is one shard of {int(match['count'])}, open the folder instead")
        return names
    if _WHOLE in names and not _is_df11(place):
        return [_WHOLE]
    chosen = without_strays(names)
    _check_numbered(place.folder, chosen)
    return chosen


def _is_df11(place: Place) -> bool:
    """Tell whether config.json says DF11: one file per compressed module, beside a model.safetensors with the rest."""
    config = None if place.leads_out("config.json") else place.read_json("config.json")
    return config is not None and "dfloat11_config" in config


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
            wanted = f"{stem}-{number:05}-of-{count}{_SUFFIX}"
            if wanted not in present:
                raise CheckpointError(folder, wanted, f"is missing, {printable(one)} is there")


def _strays(present: list[str], names: list[str], index: Index | None) -> tuple[LeftOut, ...]:
    """Name the safetensors files of the folder that were not taken."""
    default = "the index does not name it" if index else f"{_WHOLE} is the checkpoint"
    strays = sorted({*present} - {*names})
    reasons = (why_no_part(name) or default for name in strays)
    return tuple(LeftOut("file", name, reason) for name, reason in zip(strays, reasons, strict=True))
