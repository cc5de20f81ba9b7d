"""The index of an FTW folder, freetoken_weight.json: what it says by itself, before it is held against the shards.

    format, version, align, shard_limit, total_bytes     "freetoken_weight", 1, 4096, and two numbers of bytes
    tensors                                              a list of objects, see `_parse_tensor`
    shards                                               a list of {"file", "global_off", "nbytes"}
    others                                               kept as they are, at most 2 MiB of text in all

It is parsed entry by entry (`ftw.json_stream`). An error in an entry is raised after the header was checked, wherever
in the file that stands, so that the index of a newer version is refused by its version.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from ftw.dtypes import BY_TORCH_NAME, is_too_large, tensor_bits
from ftw.errors import CheckpointError
from ftw.json_stream import JsonStream
from ftw.readers._tensor_budget import TensorBudget
from ftw.strict_json import are_counts, check_depth, is_count, json_type, open_json_file, shown
from ftw.tensors import TensorInfo

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FORMAT_NAME = "freetoken_weight"
VERSION = 1
ALIGNMENT = 4096
KINDS = ("weight", "experts_bank")
_MAX_NAME_NBYTES = 255  # of a file, by Linux
_MAX_DIMENSIONS = 64
MAX_OTHERS = 2 << 20  # characters
_FLAT_KEYS = frozenset(
    "name kind dtype shape global_off nbytes logical_shape role placement ggml_type xxh3_64 file".split()
)
_TEXTS = ("role", "placement", "ggml_type", "xxh3_64")


class ShardEntry(NamedTuple):
    """One shard: its file in the same folder, and where it lies in the region, in bytes."""

    file: str
    global_off: int
    nbytes: int


class FtwIndex(NamedTuple):
    """An index: its header and further keys, and its two lists."""

    header: dict[str, Any]
    tensors: list[TensorInfo]
    shards: list[ShardEntry]


def read_ftw_index(path: Path) -> FtwIndex:
    """Read an index; where tensors and shards lie is not checked.

    Raises:
        CheckpointError: It breaks the format in any way.
    """
    with open_json_file(path) as file:
        index = _Index(path, file.seek(0, os.SEEK_END))
        file.seek(0)
        stream = JsonStream(file.read, path, "json")
        for key in stream.iter_members():
            index.read_member(stream, key)
        stream.finish()
    index.check()
    return FtwIndex(index.header, index.tensors, index.shards)


def is_plain_name(name: str) -> bool:
    """Tell whether a name from an index is that of a file in the same folder."""
    if not name or not name.isprintable() or len(os.fsencode(name)) > _MAX_NAME_NBYTES:
        return False
    return not {"/", "\\"} & set(name) and name not in (".", "..")


class _Index:
    """An index while it is read."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.header: dict[str, Any] = {}
        self.tensors: list[TensorInfo] = []
        self.shards: list[ShardEntry] = []
        self._path = path
        self._lists_found: set[str] = set()
        self._num_others = 0
        self._first_error: CheckpointError | None = None
        self._budget = TensorBudget()
        self._budget.add_header(nbytes)

    def read_member(self, stream: JsonStream, key: str) -> None:
        """Read the value of one key."""
        if key == "tensors" and stream.kind() == "a list":
            self._read_list(stream, key, self._add_tensor)
        elif key == "shards" and stream.kind() == "a list":
            self._read_list(stream, key, lambda number, entry: self.shards.append(self._parse_shard(number, entry)))
        else:
            start = stream.position
            self.header[key] = stream.read_value()
            check_depth({key: self.header[key]}, self._path, "json")
            self._num_others += stream.position - start
            if self._num_others > MAX_OTHERS:
                raise self._error("json", f"holds more than {MAX_OTHERS} characters beside tensors and shards")

    def _add_tensor(self, number: int, entry: dict[str, Any]) -> None:
        self._budget.take(self._path, "tensors")
        self.tensors.append(self._parse_tensor(number, entry))

    def check(self) -> None:
        """Check the header, and raise what was wrong with an entry."""
        header = self.header
        if header.get("format") != FORMAT_NAME:
            raise self._error("format", f"is {shown(header.get('format'))}, '{FORMAT_NAME}' is needed")
        version = header.get("version")
        if not is_count(version) or not version:
            raise self._error("version", f"is {shown(version)}, {VERSION} is needed")
        if version != VERSION:
            raise self._error("version", f"is {shown(version)}, this release reads version {VERSION}")
        if header.get("align") != ALIGNMENT:
            raise self._error("align", f"is {shown(header.get('align'))}, {ALIGNMENT} is needed")
        limit = header.get("shard_limit")
        if not is_count(limit) or not limit or limit % ALIGNMENT:
            raise self._error("shard_limit", f"is {shown(limit)}, a positive multiple of {ALIGNMENT} is needed")
        if not is_count(header.get("total_bytes")):
            raise self._error("total_bytes", f"is {shown(header.get('total_bytes'))}, a number of bytes is needed")
        for key in ("tensors", "shards"):
            if key not in self._lists_found:
                found = json_type(header[key]) if key in header else "missing"
                raise self._error(key, f"is {found}, a list of objects is needed")
        if self._first_error is not None:
            raise self._first_error

    def _read_list(self, stream: JsonStream, key: str, parse: Callable[[int, dict[str, Any]], None]) -> None:
        self._lists_found.add(key)
        for number, _ in enumerate(stream.iter_elements()):
            entry = stream.read_value()
            if self._first_error is not None:
                continue
            try:
                if not isinstance(entry, dict):
                    raise self._error(key, f"entry {number} is {json_type(entry)}, a list of objects is needed")
                if entry.keys() - _FLAT_KEYS:  # others may hold anything
                    check_depth(entry, self._path, "json")
                parse(number, entry)
            except CheckpointError as error:
                self._first_error = error

    def _error(self, subject: str, problem: str) -> CheckpointError:
        return CheckpointError(self._path, subject, problem)

    def _parse_shard(self, number: int, entry: dict[str, Any]) -> ShardEntry:
        name, offset, nbytes = entry.get("file"), entry.get("global_off"), entry.get("nbytes")
        subject = f"shard {number}"
        if not isinstance(name, str) or not is_plain_name(name):
            raise self._error(subject, f"file is {shown(name)}, the name of a file in the same folder is needed")
        if not is_count(offset):
            raise self._error(subject, f"global_off is {shown(offset)}, a number of bytes is needed")
        if not is_count(nbytes):
            raise self._error(subject, f"nbytes is {shown(nbytes)}, a number of bytes is needed")
        return ShardEntry(name, offset, nbytes)

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
        shape, offset, nbytes = self._shape(name, entry, "shape"), entry.get("global_off"), entry.get("nbytes")
        if shape is None:
            raise self._error(name, "shape is None, a list of non-negative integers is needed")
        if is_too_large(shape):
            raise self._error(name, f"shape {shown(list(shape))} has 2^63 elements or more, fewer are needed")
        if not is_count(nbytes) or tensor_bits(dtype, shape) != nbytes * 8:
            takes = f"{torch_name} {shown(list(shape))} takes {tensor_bits(dtype, shape) // 8}"
            raise self._error(name, f"nbytes is {shown(nbytes)}, {takes}")
        if not is_count(offset) or offset % ALIGNMENT:
            raise self._error(name, f"global_off is {shown(offset)}, a multiple of {ALIGNMENT} is needed")
        texts: dict[str, Any] = {key: entry.get(key) for key in _TEXTS}
        for key, value in texts.items():
            if value is not None and not isinstance(value, str):
                raise self._error(name, f"{key} is {shown(value)}, a string is needed")
        return TensorInfo(
            name=name,
            dtype=dtype.name,
            shape=shape,
            offset=offset,
            nbytes=nbytes,
            kind=KINDS[KINDS.index(kind)],  # one object for all tensors
            logical_shape=self._shape(name, entry, "logical_shape"),
            **texts,
        )

    def _shape(self, name: str, entry: dict[str, Any], key: str) -> tuple[int, ...] | None:
        """Return a list of sizes, None where there is none."""
        shape = entry.get(key)
        if shape is None:
            return None
        if not are_counts(shape):
            raise self._error(name, f"{key} is {shown(shape)}, a list of non-negative integers is needed")
        if len(shape) > _MAX_DIMENSIONS:
            raise self._error(name, f"{key} has {len(shape)} dimensions, at most {_MAX_DIMENSIONS} are allowed")
        return tuple(shape)
