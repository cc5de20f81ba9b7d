"""SafetensorsReader: a Hugging Face checkpoint, in one file or in shards.

Which files of a folder make up the checkpoint, in this order:

    *.safetensors.index.json   the shards that it names; every other safetensors file is left out
    model.safetensors          that file alone, unless config.json says that the folder is DF11, which has no index
    otherwise                  every safetensors file but consolidated* and adapter_model*; of numbered shards all
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from sys import getsizeof
from typing import TYPE_CHECKING, ClassVar

from ftw.errors import CheckpointError, printable
from ftw.files import JsonStream, is_name_inside, is_outside, open_json_file, read_json_file, short_repr
from ftw.hub import open_named_file, open_weight_file, prefetch_headers
from ftw.readers.base import DerivedFile, LeftOut
from ftw.readers.safetensors_header import read_safetensors_header
from ftw.readers.tensor_budget import KEY_NBYTES, TensorBudget
from ftw.tensors import Extent

if TYPE_CHECKING:
    from ftw.tensors import TensorInfo

_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_WHOLE = "model.safetensors"
_PLACE_NBYTES = 60  # of a name of the index, beside itself
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.safetensors")
# Other copies, or parts, of a model that lie beside its Hugging Face weights.
_STRAY_PREFIXES = {"consolidated": "another copy of the weights", "adapter_model": "an adapter, not the model"}


class SafetensorsReader:
    """A safetensors checkpoint; see `ftw.readers.base.Reader` for its attributes."""

    format: ClassVar[str] = "safetensors"

    def __init__(self, path: Path) -> None:
        self.folder = path if path.is_dir() else path.parent
        index = _find_index(path)
        budget = TensorBudget()
        weight_map = _read_weight_map(index, budget) if index else None
        names = sorted(set(weight_map.values())) if weight_map else _choose_files(path)
        is_named = index is None and len(names) == 1  # by the user, who may have linked it from anywhere
        self.files = tuple(
            open_weight_file(self.folder / name) if is_named else open_named_file(self.folder, name) for name in names
        )
        prefetch_headers(self.files)
        self.tensors: dict[str, TensorInfo] = {}
        self.metadata: dict[str, str] = {}
        self._file_of_shard = {name: number for number, name in enumerate(names)}
        left_out: list[LeftOut] = []
        placed = weight_map or {}
        reasons: dict[str, str] = {}  # one text for all stale copies that have the same
        for name, file in zip(names, self.files, strict=True):
            header = read_safetensors_header(file, name, budget)
            self.metadata.update(header.metadata)
            for tensor in header.tensors.values():
                if tensor.name not in self.tensors and placed.get(tensor.name, name) == name:
                    self.tensors[tensor.name] = tensor
                else:
                    left_out.append(self._stale_copy(tensor, placed, reasons, budget))
        if weight_map and index:
            self._check_weight_map(weight_map, index)
        self.left_out = (*left_out, *_strays(path, names, index))
        self.warnings: tuple[str, ...] = ()

    @staticmethod
    def accepts(path: Path) -> bool:
        """Tell whether a file or folder looks like safetensors, by names alone."""
        if path.is_dir():
            return any(path.glob("*" + _SUFFIX)) or any(path.glob("*" + _INDEX_SUFFIX))
        return path.name.endswith((_SUFFIX, _INDEX_SUFFIX))

    def extents(self, tensor: TensorInfo) -> tuple[Extent, ...]:
        """Return where the bytes of one of `tensors` lie: always one run."""
        return (Extent(self._file_of_shard[tensor.shard], tensor.offset, tensor.nbytes),)

    def block_order(self, tensor: TensorInfo) -> None:
        """Return None: the format is little-endian."""

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
            raise CheckpointError(self.folder / tensor.shard, tensor.name, problem)
        reason = f"a copy in {printable(tensor.shard)}, the index names {printable(weight_map[tensor.name])}"
        if reason not in reasons:
            budget.take(getsizeof(reason) + KEY_NBYTES, self.folder / tensor.shard, "header")
        return LeftOut("tensor", tensor.name, reasons.setdefault(reason, reason))

    def _check_weight_map(self, weight_map: dict[str, str], index: Path) -> None:
        for name, shard in weight_map.items():
            if name not in self.tensors:
                raise CheckpointError(index, name, f"is said to lie in '{shard}', which does not hold it")


def listed_files(path: Path) -> list[str] | None:
    """Return the names of the files of the checkpoint that `path` names, where its index or its own name says them.

    None says that every safetensors file of the folder may count. No header is read.

    Raises:
        CheckpointError: The index is broken, there are several, or numbered shards are missing.
    """
    index = _find_index(path)
    if index is not None:
        return sorted(set(_read_weight_map(index, TensorBudget()).values()))
    names = _choose_files(path)
    return names if names == [_WHOLE] or not path.is_dir() else None


def _find_index(path: Path) -> Path | None:
    if path.name.endswith(_INDEX_SUFFIX):
        return path
    index = _find_index_in(path) if path.is_dir() else None
    if index is not None and is_outside(index, path):
        raise CheckpointError(index, "file", "is a link that leads out of the folder; name the index that it leads to")
    return index


def _find_index_in(folder: Path) -> Path | None:
    preferred = folder / ("model" + _INDEX_SUFFIX)
    if preferred.exists():
        return preferred
    if (folder / _WHOLE).exists():
        return None
    indexes = sorted(folder.glob("*" + _INDEX_SUFFIX))
    if len(indexes) > 1:
        names = ", ".join(printable(index.name) for index in indexes)
        raise CheckpointError(folder, "index", f"there are several, {names}; name one of them")
    return indexes[0] if indexes else None


def _read_weight_map(index: Path, budget: TensorBudget) -> dict[str, str]:
    """Return which file each tensor lies in; of other members only that they are JSON matters."""
    weight_map: dict[str, str] = {}
    found = "missing"
    with open_json_file(index) as file:
        budget.add_header(file.seek(0, os.SEEK_END))
        file.seek(0)
        stream = JsonStream(file.read, index, "json")
        for key in stream.iter_members():
            budget.take(KEY_NBYTES + getsizeof(key), index, "json")
            if key != "weight_map":
                stream.read_value()
            elif stream.kind() == "an object":
                weight_map, found = _read_places(stream, index, budget), "empty"
            else:
                found = stream.describe()
                break
        else:
            stream.finish()
    if not weight_map:
        raise CheckpointError(index, "weight_map", f"is {found}, an object of tensor and file names is needed")
    return weight_map


def _read_places(stream: JsonStream, index: Path, budget: TensorBudget) -> dict[str, str]:
    weight_map: dict[str, str] = {}
    inside: dict[str, str] = {}  # of 100,000 names, those of a few thousand files are looked at, and kept once
    for name in stream.iter_members():
        budget.take(_PLACE_NBYTES + KEY_NBYTES + getsizeof(name), index, "weight_map")
        shard = stream.read_value()
        if isinstance(shard, str) and shard not in inside and _is_inside(shard):
            budget.take(2 * KEY_NBYTES + getsizeof(shard), index, "weight_map")
            inside[shard] = shard
        if not isinstance(shard, str) or shard not in inside:
            problem = (
                f"file name {short_repr(shard)}, a path of a {_SUFFIX} file inside the checkpoint's folder is needed"
            )
            raise CheckpointError(index, name, problem)
        weight_map[name] = inside[shard]
    budget.give_back(KEY_NBYTES * len(weight_map))
    return weight_map


def _is_inside(name: str) -> bool:
    return name.endswith(_SUFFIX) and is_name_inside(name, is_canonical=False)


def _choose_files(path: Path) -> list[str]:
    """Return the names of the files that make up a checkpoint without an index."""
    if not path.is_dir():
        match = _NUMBERED.fullmatch(path.name)
        if match and int(match["count"]) > 1:
            raise CheckpointError(path, "file", f"is one shard of {int(match['count'])}, open the folder instead")
        return [path.name]
    names = sorted(file.name for file in path.glob("*" + _SUFFIX))
    if _WHOLE in names and not _is_df11(path):
        return [_WHOLE]
    chosen = [name for name in names if not name.startswith(tuple(_STRAY_PREFIXES))] or names
    _check_numbered(path, chosen)
    return chosen


def _is_df11(folder: Path) -> bool:
    """Tell whether config.json says DF11: one file per compressed module, beside a model.safetensors with the rest."""
    config = folder / "config.json"
    if not config.is_file() or is_outside(config, folder):
        return False
    return "dfloat11_config" in read_json_file(config, allow_non_finite=True)


def _check_numbered(folder: Path, names: list[str]) -> None:
    """Check that numbered shards without an index are all there."""
    present = set(names)
    sets = {(match["stem"], match["count"]): match[0] for match in filter(None, map(_NUMBERED.fullmatch, names))}
    for (stem, count), one in sets.items():
        for number in range(1, int(count) + 1):
            wanted = f"{stem}-{number:05}-of-{count}{_SUFFIX}"
            if wanted not in present:
                raise CheckpointError(folder, wanted, f"is missing, {printable(one)} is there")


def _strays(path: Path, names: list[str], index: Path | None) -> list[LeftOut]:
    """Name the safetensors files of the folder that were not taken."""
    if not path.is_dir():
        return []
    default = "the index does not name it" if index else f"{_WHOLE} is the checkpoint"
    strays = sorted({file.name for file in path.glob("*" + _SUFFIX)} - set(names))
    reasons = (
        next((why for prefix, why in _STRAY_PREFIXES.items() if name.startswith(prefix)), default) for name in strays
    )
    return [LeftOut("file", name, reason) for name, reason in zip(strays, reasons, strict=True)]
