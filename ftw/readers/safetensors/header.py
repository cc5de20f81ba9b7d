"""The header of one safetensors file.

    bytes            content
    0 .. 7           n, the header's length, unsigned, little-endian; at most 100,000,000
    8 .. 8+n-1       a JSON object: tensor name -> {"dtype", "shape", "data_offsets": [begin, end]}, and perhaps
                     "__metadata__" -> {string: string}
    8+n .. end       the tensors' bytes; offsets count from here, cover them all, and neither overlap nor leave holes

What the safetensors package 0.8 opens is opened, and what it refuses is refused, as `fuzz.headers` compares them by
drawn files, but for this:

    read here alone     numbers from 1.79769e308 to the largest double in a field that is ignored, where that package
                        rounds up to infinity
    read there alone    a key that occurs twice in one object, the last one counting
                        an entry that is a list of its three values, a dtype that is {name: null}
                        sizes that multiply to 2^63 or more, zeros left out
                        what no model has: more than 64 dimensions, a name of more than 65,536 characters, an entry of
                        more than 1 MiB, metadata of more than 262,144 entries or 8 MiB or with a text of 4 MiB, headers
                        of 256 MiB in all, and more memory for names than `ftw.readers.tensor_budget` allows

The header is parsed window by window (`ftw.files.json_stream`), and costs what its tensors do, which is counted.
"""

from __future__ import annotations

from operator import attrgetter
from sys import getsizeof
from typing import TYPE_CHECKING, Any, NamedTuple

from ftw.dtypes import DTYPES, is_too_large, tensor_bits
from ftw.errors import CheckpointError
from ftw.files import MAX_NBYTES, JsonStream, are_counts, find_impostor, json_type, short_repr
from ftw.readers.tensor_budget import KEY_NBYTES, MAX_DIMENSIONS, TENSOR_NBYTES
from ftw.tensors import TensorInfo

if TYPE_CHECKING:
    from pathlib import Path

    from ftw.files import WeightFile
    from ftw.readers.tensor_budget import TensorBudget

_LENGTH_NBYTES = 8
_FIRST_NBYTES = 16 << 10  # holds the whole header of most shards of a large checkpoint, which then takes one read
_READ_NBYTES = 4 << 20  # at a time, of a longer one; on the hub each is a request
_MAX_METADATA = 1 << 18  # entries
_MAX_METADATA_TEXT = 8 << 20  # characters
_METADATA = "__metadata__"

# Other formats; letters in lower case.
_OTHERS: tuple[tuple[bytes, str], ...] = (
    (b"gguf", "is a GGUF file under another name"),
    (b"{", "begins with JSON instead of a header length"),
)


class SafetensorsHeader(NamedTuple):
    """What one file's header says; offsets of `tensors` count from the start of the file."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def read_safetensors_header(file: WeightFile, shard: str, budget: TensorBudget) -> SafetensorsHeader:
    """Read and check the header of one file; `shard` is the name that its tensors carry.

    Raises:
        CheckpointError: The header breaks the format in any way, or describes more than the budget has.
    """
    path = file.path
    first = file.read(0, min(file.nbytes, _FIRST_NBYTES))
    length = _check_length(file, first[:_LENGTH_NBYTES])
    data_start = _LENGTH_NBYTES + length
    budget.add_header(length, path)
    stream = JsonStream(_Text(file, first, data_start).read, path, "header")
    metadata: dict[str, str] = {}
    tensors: list[TensorInfo] = []
    for name in stream.iter_members():
        if name == _METADATA:
            metadata = _read_metadata(stream, path)
        else:
            budget.take(TENSOR_NBYTES + KEY_NBYTES + getsizeof(name), path, "header")
            tensors.append(_parse_entry(name, stream.read_value(), data_start, shard, path, budget))
    stream.finish()
    budget.give_back(KEY_NBYTES * len(tensors))
    tensors.sort(key=attrgetter("offset", "nbytes"))
    _check_coverage(tensors, data_start, file.nbytes, path)
    return SafetensorsHeader({tensor.name: tensor for tensor in tensors}, metadata)


class _Text:
    """The header's text, which ends where the data begin; `first` are the file's first bytes, already read."""

    def __init__(self, file: WeightFile, first: bytes, end: int) -> None:
        self._file = file
        self._end = end
        self._offset = _LENGTH_NBYTES
        self._held = memoryview(first)[_LENGTH_NBYTES:end]

    def read(self, nbytes: int) -> bytes:
        """Return its next bytes, at most `nbytes`; nothing at the end."""
        if not self._held and self._offset < self._end:  # no file is opened to read nothing
            wanted = min(max(nbytes, _READ_NBYTES), self._end - self._offset)
            self._held = memoryview(b"")  # freed before the next one is read
            self._held = memoryview(self._file.read(self._offset, wanted))
        content = bytes(self._held[:nbytes])
        self._held = self._held[nbytes:]
        self._offset += len(content)
        return content


def _check_length(file: WeightFile, first: bytes) -> int:
    if file.nbytes < _LENGTH_NBYTES:
        raise CheckpointError(file.path, "header", f"the file is {file.nbytes} bytes long, a header takes at least 8")
    length = int.from_bytes(first, "little")
    if 0 < length <= min(MAX_NBYTES, file.nbytes - _LENGTH_NBYTES):
        return length
    impostor = find_impostor(first, _OTHERS)
    if impostor:
        raise CheckpointError(file.path, "file", impostor)
    if length > MAX_NBYTES:
        raise CheckpointError(file.path, "header", f"is {length} bytes long, at most {MAX_NBYTES} are allowed")
    if not length:
        raise CheckpointError(file.path, "header", "is 0 bytes long, a JSON object is needed")
    problem = f"is {length} bytes long, but only {file.nbytes - _LENGTH_NBYTES} bytes follow its length"
    raise CheckpointError(file.path, "header", problem)


def _read_metadata(stream: JsonStream, path: Path) -> dict[str, str]:
    if stream.kind() != "an object":
        found = stream.describe()
        if found == "null":
            return {}
        raise CheckpointError(path, _METADATA, f"is {found}, an object of strings is needed")
    metadata: dict[str, str] = {}
    start = stream.position
    for key in stream.iter_members():
        if stream.kind() != "a string":
            raise CheckpointError(path, _METADATA, f"{short_repr(key)} is {stream.describe()}, a string is needed")
        if len(metadata) == _MAX_METADATA:
            raise CheckpointError(path, _METADATA, f"has more than {_MAX_METADATA} entries")
        metadata[key] = stream.read_value()
        if stream.position - start > _MAX_METADATA_TEXT:
            raise CheckpointError(path, _METADATA, f"is longer than {_MAX_METADATA_TEXT} characters")
    return metadata


def _parse_entry(name: str, entry: Any, data_start: int, shard: str, path: Path, budget: TensorBudget) -> TensorInfo:
    if not isinstance(entry, dict):
        raise CheckpointError(path, name, f"is {json_type(entry)}, an object is needed")
    dtype_name, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise CheckpointError(path, name, f"dtype is {short_repr(dtype_name)}, allowed are {', '.join(DTYPES)}")
    if not are_counts(shape):
        raise CheckpointError(path, name, f"shape is {short_repr(shape)}, a list of non-negative integers is needed")
    if len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(path, name, f"shape has {len(shape)} dimensions, at most {MAX_DIMENSIONS} are allowed")
    if is_too_large(shape):
        raise CheckpointError(path, name, f"shape {short_repr(shape)} has 2^63 elements or more, fewer are needed")
    if not are_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(path, name, f"data_offsets is {short_repr(offsets)}, [begin, end] in bytes is needed")
    begin, end = offsets
    if begin > end:
        problem = f"data_offsets end at {short_repr(end)}, before they begin at {short_repr(begin)}"
        raise CheckpointError(path, name, problem)
    bits = tensor_bits(dtype, shape)
    if bits != (end - begin) * 8:
        takes = f"{dtype.name} {short_repr(shape)} takes {bits / 8:g}"
        raise CheckpointError(path, name, f"data_offsets span {short_repr(end - begin)} bytes, {takes}")
    kept = budget.keep_shape(shape, path, "header")
    return TensorInfo(name, dtype.name, kept, data_start + begin, end - begin, shard)


def _check_coverage(tensors: list[TensorInfo], data_start: int, file_nbytes: int, path: Path) -> None:
    """Check that the tensors, sorted by offset, cover the data exactly."""
    position = data_start
    for tensor in tensors:
        if tensor.offset != position:
            kind = "overlaps the tensor before it" if tensor.offset < position else "leaves a hole before it"
            found, allowed = tensor.offset - data_start, position - data_start
            raise CheckpointError(path, tensor.name, f"begins at {short_repr(found)} and {kind}, {allowed} is needed")
        position += tensor.nbytes
    if position > file_nbytes:
        problem = f"is {file_nbytes} bytes long, {position - file_nbytes} bytes short of what the header describes"
        raise CheckpointError(path, "file", problem)
    if position < file_nbytes:
        problem = f"holds {file_nbytes - position} bytes after the last tensor, none are allowed"
        raise CheckpointError(path, "file", problem)
