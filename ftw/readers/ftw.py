"""FtwReader: an FTW folder.

    freetoken_weight.json      the index: format, version, align, shard_limit, total_bytes, tensors[], shards[]
    freetoken-00000.ftw …      one logical region of bytes, cut into shards that follow each other without a gap
    side files                 safetensors files that the index names under "side_files", found by their own headers

Every tensor begins at a multiple of 4096 in the region; zeros fill it up to the next multiple. A tensor larger than a
shard goes on in the next one. Unknown keys are kept in `metadata` and otherwise ignored.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ftw.dtypes import BY_TORCH_NAME, is_too_large, tensor_bits
from ftw.errors import CheckpointError
from ftw.host_memory import align_up
from ftw.hub import open_weight_file
from ftw.readers._safetensors_header import read_safetensors_header
from ftw.readers.base import DerivedFile
from ftw.strict_json import is_count, read_json_file, shown
from ftw.tensors import Extent, TensorInfo

if TYPE_CHECKING:
    from ftw.readers.base import LeftOut
    from ftw.weight_file import WeightFile

INDEX_NAME = "freetoken_weight.json"
GGUF_METADATA_NAME = "source_metadata.gguf"  # header and key-values of the GGUF that an FTW was made from
SHARD_NAME = "freetoken-{:05}.ftw"
JOURNAL_NAME = ".ftw-journal"  # of a folder that is being written
# What a folder calls its own files, some also while they are being written; nothing else may have such a name.
OWN_NAMES = re.compile(rf"freetoken-\d{{5,}}\.ftw|({re.escape(INDEX_NAME)}|{re.escape(JOURNAL_NAME)})(\.tmp)?")
FORMAT_NAME = "freetoken_weight"
VERSION = 1
ALIGNMENT = 4096
_MAX_NAME_NBYTES = 255  # of a file, by Linux
KINDS = ("weight", "experts_bank")


class FtwReader:
    """An FTW checkpoint; see `ftw.readers.base.Reader`. `metadata` is the index less its two lists."""

    format: ClassVar[str] = "ftw"

    def __init__(self, path: Path) -> None:
        self.folder = path if path.is_dir() else path.parent
        self._index_path = self.folder / INDEX_NAME
        index = read_json_file(self._index_path)
        self._check_header(index)
        self.files, self._shard_offsets = self._read_shards(index)
        region = self._read_tensors(index)
        self.tensors: dict[str, TensorInfo] = {tensor.name: tensor for tensor in region}
        self._file_of_side_file: dict[str, int] = {}
        self._read_side_files(index.get("side_files"))
        self.metadata: dict[str, Any] = {key: value for key, value in index.items() if key not in ("tensors", "shards")}
        self.left_out: tuple[LeftOut, ...] = ()
        self.warnings: tuple[str, ...] = ()

    @staticmethod
    def accepts(path: Path) -> bool:
        """Tell whether a folder has an FTW index, or the path names one."""
        return (path / INDEX_NAME).is_file() if path.is_dir() else path.name == INDEX_NAME

    def extents(self, tensor: TensorInfo) -> tuple[Extent, ...]:
        """Return where the bytes of one of `tensors` lie: one run for each shard that it spans."""
        if tensor.shard:
            return (Extent(self._file_of_side_file[tensor.shard], tensor.offset, tensor.nbytes),)
        extents: list[Extent] = []
        offset, end = tensor.offset, tensor.offset + tensor.nbytes
        shard = max(bisect_right(self._shard_offsets, offset) - 1, 0)
        while offset < end:
            start = self._shard_offsets[shard]
            taken = min(end, start + self.files[shard].nbytes) - offset
            if taken:
                extents.append(Extent(shard, offset - start, taken))
            offset += taken
            shard += 1
        return tuple(extents)

    def block_order(self, tensor: TensorInfo) -> None:
        """Return None: the format is little-endian."""

    def derived_files(self) -> tuple[DerivedFile, ...]:
        """Return the copy of the metadata of the GGUF that this was made from, where there is one."""
        path = self.folder / GGUF_METADATA_NAME
        if not path.is_file():
            return ()
        content = path.read_bytes()
        return (DerivedFile(GGUF_METADATA_NAME, len(content), lambda: iter((content,))),)

    def _error(self, subject: str, problem: str) -> CheckpointError:
        return CheckpointError(self._index_path, subject, problem)

    def _check_header(self, index: dict[str, Any]) -> None:
        if index.get("format") != FORMAT_NAME:
            raise self._error("format", f"is {shown(index.get('format'))}, '{FORMAT_NAME}' is needed")
        version = index.get("version")
        if not is_count(version) or not version:
            raise self._error("version", f"is {shown(version)}, {VERSION} is needed")
        if version != VERSION:
            raise self._error("version", f"is {shown(version)}, this release reads version {VERSION}")
        if index.get("align") != ALIGNMENT:
            raise self._error("align", f"is {shown(index.get('align'))}, {ALIGNMENT} is needed")
        limit = index.get("shard_limit")
        if not is_count(limit) or not limit or limit % ALIGNMENT:
            raise self._error("shard_limit", f"is {shown(limit)}, a positive multiple of {ALIGNMENT} is needed")
        if not is_count(index.get("total_bytes")):
            raise self._error("total_bytes", f"is {shown(index.get('total_bytes'))}, a number of bytes is needed")
        for key in ("tensors", "shards"):
            entries = index.get(key)
            if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
                raise self._error(key, "a list of objects is needed")

    def _read_shards(self, index: dict[str, Any]) -> tuple[tuple[WeightFile, ...], list[int]]:
        files: list[WeightFile] = []
        offsets: list[int] = []
        names: set[str] = set()
        position = 0
        for number, entry in enumerate(index["shards"]):
            name, offset, nbytes = entry.get("file"), entry.get("global_off"), entry.get("nbytes")
            subject = f"shard {number}"
            if not isinstance(name, str) or not _is_plain_name(name):
                raise self._error(subject, f"file is {shown(name)}, the name of a file in the same folder is needed")
            if offset != position or not is_count(offset):
                raise self._error(subject, f"global_off is {shown(offset)}, {position} is needed")
            if not is_count(nbytes) or nbytes > index["shard_limit"]:
                raise self._error(subject, f"nbytes is {shown(nbytes)}, at most shard_limit is allowed")
            if name in names:
                raise self._error(subject, f"file '{name}' occurs twice, names must be unique")
            names.add(name)
            file = open_weight_file(self.folder / name)
            if file.nbytes != nbytes:
                raise CheckpointError(file.path, "file", f"is {file.nbytes} bytes long, the index says {nbytes}")
            files.append(file)
            offsets.append(position)
            position += nbytes
        if position != index["total_bytes"]:
            raise self._error("total_bytes", f"is {shown(index['total_bytes'])}, the shards hold {position}")
        return tuple(files), offsets

    def _read_tensors(self, index: dict[str, Any]) -> list[TensorInfo]:
        tensors = [self._parse_tensor(number, entry) for number, entry in enumerate(index["tensors"])]
        tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
        names: set[str] = set()
        position = 0
        for tensor in tensors:
            if tensor.name in names:
                raise self._error(tensor.name, "occurs twice, names must be unique")
            names.add(tensor.name)
            if tensor.offset > index["total_bytes"]:
                problem = f"begins at {shown(tensor.offset)}, the shards hold {index['total_bytes']} bytes"
                raise self._error(tensor.name, problem)
            if tensor.nbytes and tensor.offset < position:
                raise self._error(tensor.name, f"begins at {tensor.offset} and overlaps the tensor before it")
            position = max(position, tensor.offset + align_up(tensor.nbytes, ALIGNMENT))
            if position > index["total_bytes"]:
                problem = f"ends at {position} with its padding, the shards hold {index['total_bytes']} bytes"
                raise self._error(tensor.name, problem)
        return tensors

    def _parse_tensor(self, number: int, entry: dict[str, Any]) -> TensorInfo:
        name = entry.get("name")
        if not isinstance(name, str):
            raise self._error(f"tensor {number}", f"name is {shown(name)}, a string is needed")
        kind = entry.get("kind")
        if kind not in KINDS:
            raise self._error(name, f"kind is {shown(kind)}, allowed are {', '.join(KINDS)}")
        torch_name = entry.get("dtype")
        dtype = BY_TORCH_NAME.get(torch_name) if isinstance(torch_name, str) else None
        if dtype is None:
            raise self._error(name, f"dtype is {shown(torch_name)}, allowed are {', '.join(BY_TORCH_NAME)}")
        shape, offset, nbytes = entry.get("shape"), entry.get("global_off"), entry.get("nbytes")
        if not isinstance(shape, list) or not all(map(is_count, shape)):
            raise self._error(name, "shape is not a list of non-negative integers")
        if is_too_large(shape):
            raise self._error(name, "shape has 2^63 elements or more")
        if not is_count(nbytes) or tensor_bits(dtype, shape) != nbytes * 8:
            problem = f"nbytes is {shown(nbytes)}, {torch_name} {shown(shape)} takes {tensor_bits(dtype, shape) // 8}"
            raise self._error(name, problem)
        if not is_count(offset) or offset % ALIGNMENT:
            raise self._error(name, f"global_off is {shown(offset)}, a multiple of {ALIGNMENT} is needed")
        logical_shape = entry.get("logical_shape")
        if logical_shape is not None and not (isinstance(logical_shape, list) and all(map(is_count, logical_shape))):
            raise self._error(name, "logical_shape is not a list of non-negative integers")
        texts: dict[str, Any] = {key: entry.get(key) for key in ("role", "placement", "ggml_type", "xxh3_64")}
        for key, value in texts.items():
            if value is not None and not isinstance(value, str):
                raise self._error(name, f"{key} is {shown(value)}, a string is needed")
        return TensorInfo(
            name=name,
            dtype=dtype.name,
            shape=tuple(shape),
            offset=offset,
            nbytes=nbytes,
            kind=kind,
            logical_shape=None if logical_shape is None else tuple(logical_shape),
            **texts,
        )

    def _read_side_files(self, names: object) -> None:
        """Add the tensors of the side files; where the region holds one too, the region counts."""
        if names is None:
            return
        if not isinstance(names, list) or not all(isinstance(name, str) and _is_plain_name(name) for name in names):
            raise self._error("side_files", "a list of file names in the same folder is needed")
        region = set(self.tensors)
        for name in names:
            if name in self._file_of_side_file:
                raise self._error("side_files", f"'{name}' occurs twice, names must be unique")
            file = open_weight_file(self.folder / name)
            self._file_of_side_file[name] = len(self.files)
            self.files = (*self.files, file)
            for tensor in read_safetensors_header(file, name).tensors.values():
                other = self.tensors.setdefault(tensor.name, tensor)
                if other is not tensor and tensor.name not in region:
                    problem = f"lies in {other.shard} too, and the index does not say which one counts"
                    raise CheckpointError(file.path, tensor.name, problem)


def _is_plain_name(name: str) -> bool:
    if not name or not name.isprintable() or len(os.fsencode(name)) > _MAX_NAME_NBYTES:
        return False
    return not {"/", "\\"} & set(name) and name not in (".", "..")
