"""The index of an FTW folder, freetoken_weight.json: what it says by itself, before it is compared with the shards.

    format, version, align, shard_limit, total_bytes     "freetoken_weight", 1, 4096, and two numbers of bytes
    tensors                                              a list of objects, see `_parse_tensor`
    shards                                               a list of {"file", "global_off", "nbytes"}
    others                                               kept as they are, at most 2 MiB of text in all

All numbers are below 2^63. It is parsed entry by entry (`ftw.files.json_stream`). An error in an entry is raised after
the header was checked, wherever in the file that stands, so that the index of a newer version is refused by its
version.
"""

from __future__ import annotations

import os
import re
from sys import getsizeof
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from ftw.dtypes import BY_TORCH_NAME, is_too_large, shape_of_torch, tensor_bits
from ftw.errors import CheckpointError
from ftw.files import JsonStream, are_counts, is_count, is_name_inside, json_type, open_json_file, short_repr
from ftw.readers.ftw_format import ALIGNMENT, FORMAT_NAME, KINDS, MAX_OTHERS, VERSION
from ftw.readers.tensor_budget import KEY_NBYTES, MAX_DIMENSIONS, TENSOR_NBYTES
from ftw.tensors import TensorInfo

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ftw.readers.tensor_budget import TensorBudget

_SHARD_NBYTES = 2048  # with its open file, or the error about it
_VALUE_NBYTES = 26  # of each character of a value, where they are "[],[],"
_MAX_NUMBER = (1 << 63) - 1
_DIGITS = {"xxh3_64": 16, "sha256": 64}  # of checksums
_CHECKSUM = re.compile(r"[0-9a-f]*")
_MAX_TYPE = 64  # characters of a GGUF type's name
_TEXTS = ("role", "placement", "ggml_type", *_DIGITS)


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


def read_ftw_index(path: Path, budget: TensorBudget, real: str | None) -> FtwIndex:
    """Read an index; where tensors and shards lie is not checked.

    Args:
        path: The index.
        budget: What counts its tensors, and those of side files.
        real: Where it lies, without links; None follows them to anywhere.

    Raises:
        CheckpointError: It breaks the format in any way, or describes more than the budget has.
    """
    with open_json_file(path, real) as file:
        index = _Index(path, budget)
        index.budget.add_header(file.seek(0, os.SEEK_END), path)
        file.seek(0)
        stream = JsonStream(file.read, path, "json")
        for key in stream.iter_members():
            index.read_member(stream, key)
        stream.finish()
    index.check()
    return FtwIndex(index.header, index.tensors, index.shards)


class _Index:
    """An index while it is read."""

    def __init__(self, path: Path, budget: TensorBudget) -> None:
        self.header: dict[str, Any] = {}
        self.tensors: list[TensorInfo] = []
        self.shards: list[ShardEntry] = []
        self._path = path
        self._lists_found: set[str] = set()
        self._num_others = 0
        self._first_error: CheckpointError | None = None
        self.budget = budget

    def read_member(self, stream: JsonStream, key: str) -> None:
        """Read the value of one key."""
        if key == "tensors" and stream.kind() == "a list":
            self._read_list(stream, key, self._add_tensor)
        elif key == "shards" and stream.kind() == "a list":
            self._read_list(stream, key, self._add_shard)
        else:
            start = stream.position
            self.header[key] = stream.read_value()
            self._num_others += stream.position - start
            if self._num_others > MAX_OTHERS:
                raise self._error("json", f"holds more than {MAX_OTHERS} characters beside tensors and shards")
            taken = 2 * KEY_NBYTES + getsizeof(key) + _VALUE_NBYTES * (stream.position - start)
            self.budget.take(taken, self._path, "json")

    def _add_tensor(self, number: int, entry: dict[str, Any]) -> None:
        tensor = self._parse_tensor(number, entry)
        texts = (tensor.name, *(getattr(tensor, key) for key in _TEXTS))
        taken = TENSOR_NBYTES + sum(getsizeof(text) for text in texts if text is not None)
        self.budget.take(taken, self._path, "tensors")
        self.tensors.append(tensor)

    def _add_shard(self, number: int, entry: dict[str, Any]) -> None:
        shard = self._parse_shard(number, entry)
        self.budget.take(_SHARD_NBYTES + getsizeof(shard.file), self._path, "shards")
        self.shards.append(shard)

    def check(self) -> None:
        """Check the header, and raise what was wrong with an entry."""
        header = self.header
        if header.get("format") != FORMAT_NAME:
            raise self._error("format", f"is {short_repr(header.get('format'))}, '{FORMAT_NAME}' is needed")
        version = header.get("version")
        if not is_count(version) or not version:
            raise self._error("version", f"is {short_repr(version)}, {VERSION} is needed")
        if version != VERSION:
            raise self._error("version", f"is {short_repr(version)}, this release reads version {VERSION}")
        if header.get("align") != ALIGNMENT:
            raise self._error("align", f"is {short_repr(header.get('align'))}, {ALIGNMENT} is needed")
        limit = header.get("shard_limit")
        if not _is_number(limit) or not limit or limit % ALIGNMENT:
            raise self._error("shard_limit", f"is {short_repr(limit)}, a positive multiple of {ALIGNMENT} is needed")
        if not _is_number(header.get("total_bytes")):
            raise self._error("total_bytes", f"is {short_repr(header.get('total_bytes'))}, a number of bytes is needed")
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
                parse(number, entry)
            except CheckpointError as error:
                self._first_error = error

    def _error(self, subject: str, problem: str) -> CheckpointError:
        return CheckpointError(self._path, subject, problem)

    def _parse_shard(self, number: int, entry: dict[str, Any]) -> ShardEntry:
        name, offset, nbytes = entry.get("file"), entry.get("global_off"), entry.get("nbytes")
        subject = f"shard {number}"
        if not isinstance(name, str) or not is_name_inside(name, is_flat=True):
            raise self._error(subject, f"file is {short_repr(name)}, the name of a file in the same folder is needed")
        if not _is_number(offset):
            raise self._error(subject, f"global_off is {short_repr(offset)}, a number of bytes is needed")
        if not _is_number(nbytes):
            raise self._error(subject, f"nbytes is {short_repr(nbytes)}, a number of bytes is needed")
        return ShardEntry(name, offset, nbytes)

    def _parse_tensor(self, number: int, entry: dict[str, Any]) -> TensorInfo:
        name = entry.get("name")
        if not isinstance(name, str):
            raise self._error(f"tensor {number}", f"name is {short_repr(name)}, a string is needed")
        kind = entry.get("kind")
        if kind not in KINDS:
            raise self._error(name, f"kind is {short_repr(kind)}, allowed are {', '.join(KINDS)}")
        torch_name = entry.get("dtype")
        dtype = BY_TORCH_NAME.get(torch_name) if isinstance(torch_name, str) else None
        if dtype is None:
            raise self._error(name, f"dtype is {short_repr(torch_name)}, allowed are {', '.join(BY_TORCH_NAME)}")
        told, offset, nbytes = self._shape(name, entry, "shape"), entry.get("global_off"), entry.get("nbytes")
        if told is None:
            raise self._error(name, "shape is None, a list of non-negative integers is needed")
        shape = shape_of_torch(dtype, told)
        if shape is None:
            raise self._error(name, f"shape is [], {torch_name} needs a dimension")
        if is_too_large(shape):
            raise self._error(name, f"shape {short_repr(list(shape))} has 2^63 elements or more, fewer are needed")
        if not is_count(nbytes) or tensor_bits(dtype, shape) != nbytes * 8:
            takes = f"{torch_name} {short_repr(list(shape))} takes {tensor_bits(dtype, shape) // 8}"
            raise self._error(name, f"nbytes is {short_repr(nbytes)}, {takes}")
        if not _is_number(offset) or offset % ALIGNMENT:
            raise self._error(name, f"global_off is {short_repr(offset)}, a multiple of {ALIGNMENT} is needed")
        texts: dict[str, Any] = {key: entry.get(key) for key in _TEXTS}
        for key, value in texts.items():
            if value is not None and not isinstance(value, str):
                raise self._error(name, f"{key} is {short_repr(value)}, a string is needed")
        for key, digits in _DIGITS.items():
            found = texts[key]
            if found is not None and not (len(found) == digits and _CHECKSUM.fullmatch(found)):
                raise self._error(name, f"{key} is {short_repr(found)}, {digits} hexadecimal digits are needed")
        ggml_type = texts["ggml_type"]
        if ggml_type is not None and not (ggml_type.isprintable() and len(ggml_type) <= _MAX_TYPE):
            raise self._error(name, f"ggml_type is {short_repr(ggml_type)}, the name of a GGUF type is needed")
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
        """Return a list of sizes, None if there is none."""
        shape = entry.get(key)
        if shape is None:
            return None
        if not are_counts(shape):
            raise self._error(name, f"{key} is {short_repr(shape)}, a list of non-negative integers is needed")
        if len(shape) > MAX_DIMENSIONS:
            raise self._error(name, f"{key} has {len(shape)} dimensions, at most {MAX_DIMENSIONS} are allowed")
        if max(shape, default=0) > _MAX_NUMBER:
            raise self._error(name, f"{key} is {short_repr(shape)}, sizes below 2^63 are needed")
        return self.budget.keep_shape(shape, self._path, "tensors")


def _is_number(value: object) -> TypeGuard[int]:
    """Tell whether a value is a count that fits in 63 bits, as all numbers of the format do."""
    return is_count(value) and value <= _MAX_NUMBER
