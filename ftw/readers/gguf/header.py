"""The header of one GGUF file.

    field          bytes   content
    magic          4       "GGUF"
    version        4       2 or 3; its low 16 bits read as 0 if the file has the other byte order
    tensor count   8
    key count      8
    key-values             see `ftw.readers.gguf.metadata`
    tensors                one entry for each:
      name           8 + n   its length and its UTF-8 text
      dimensions     4       0 to 4; a tensor of none holds one element
      sizes          8 each  fastest first, in elements
      type           4       a code of `ftw.ggml_types`
      offset         8       from the start of the data, a multiple of the alignment
    data                   from the next multiple of general.alignment (32 if it has no such key) on

All numbers are in the file's byte order. Versions 2 and 3 share this layout; version 1 had lengths of 4 bytes.

What llama.cpp loads of a file is read, and what it refuses is refused, as `fuzz.headers` compares them by drawn files,
but for this:

    read here alone     the gguf package reads it: the other byte order, tensors in any order and with holes between
                        them, arrays in arrays
                        names that differ behind a zero byte alone
                        tensors without elements that would begin in padding which the file lacks
                        a name of an architecture that llama.cpp does not know
    read there alone    the gguf package refuses it: keys and names that are not UTF-8
                        the format's specification does: a bool that is neither 0 nor 1, a key of more than 65,535 bytes
                        types that the installed gguf package does not know
                        a tensor without a name; no elements but sizes that multiply to 2^63 or more, zeros left out
                        what no model has: the bounds of `ftw.readers.gguf.metadata` and of `ftw.readers.tensor_budget`,
                        an alignment of more than 1 MiB
"""

from __future__ import annotations

from math import prod
from sys import getsizeof
from typing import TYPE_CHECKING, Any, NamedTuple

from ftw.dtypes import is_too_large
from ftw.errors import CheckpointError
from ftw.files import find_impostor, short_repr
from ftw.ggml_types import ggml_types, unknown_type
from ftw.readers.gguf.cursor import Cursor
from ftw.readers.gguf.metadata import ALIGNMENT_KEY, ARCHITECTURE_KEY, MIN_ENTRY_NBYTES, read_metadata, read_name
from ftw.readers.tensor_budget import TENSOR_NBYTES, TensorBudget

if TYPE_CHECKING:
    from ftw.files import WeightFile
    from ftw.ggml_types import GgmlType
    from ftw.readers.gguf.metadata import ValueType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_MIN_NBYTES = 4 + 4 + 8 + 8
_MIN_TENSOR_NBYTES = 8 + 1 + 4 + 4 + 8
_MAX_DIMENSIONS = 4
_MAX_NAME_NBYTES = 63  # ggml keeps names in 64 bytes, with a zero at the end
_TYPE_KEY = "general.type"  # "model", "mmproj", "adapter" or "imatrix"
_MAX_FIRST_KEYS = 16  # what a file is stands among the first of them
MAX_TENSORS = 1 << 17  # of a model; those with the most have 3,000, since experts are stacked


class RawTensor(NamedTuple):
    """One tensor as a file describes it: `sizes` fastest first, in elements; `offset` from the start of the data."""

    name: str
    sizes: tuple[int, ...]
    ggml_type: GgmlType
    offset: int
    nbytes: int


class GgufHeader(NamedTuple):
    """What one file's header says.

    Attributes:
        byte_order: "<" or ">", as the struct module has it.
        version: 2 or 3.
        metadata: The key-values; arrays are `MetadataArray`, long texts `MetadataText`, which read them when asked.
        value_types: How each of them is encoded.
        tensors: The tensors, in the order of the header.
        metadata_end: Where the key-values end in the file.
        header_end: Where the tensor entries end.
        alignment: The file's own general.alignment.
    """

    byte_order: str
    version: int
    metadata: dict[str, Any]
    value_types: dict[str, ValueType]
    tensors: list[RawTensor]
    metadata_end: int
    header_end: int
    alignment: int | None


def read_gguf_header(file: WeightFile, budget: TensorBudget) -> GgufHeader:
    """Read and check the header of one file; where its tensors lie is not compared with the file.

    Raises:
        CheckpointError: The header breaks the format in any way, or describes more than the budget has.
    """
    byte_order, version = _read_magic(file)
    cursor = Cursor(file, byte_order, len(MAGIC) + 4, most=budget.nbytes_left)
    num_tensors, num_keys = _read_counts(cursor)
    if num_tensors > MAX_TENSORS:
        raise cursor.error(f"the number of tensors is {num_tensors}, at most {MAX_TENSORS} are allowed")
    metadata = read_metadata(cursor, num_keys, budget)
    metadata_end = cursor.position
    tensors = _read_tensors(cursor, num_tensors, budget)
    alignment = metadata.values.get(ALIGNMENT_KEY)
    return GgufHeader(byte_order, version, *metadata, tensors, metadata_end, cursor.position, alignment)


def read_gguf_kinds(file: WeightFile) -> tuple[str, ...]:
    """Return the architecture of one file and its general.type, as far as its first key-values say them.

    Raises:
        CheckpointError: They break the format.
    """
    byte_order, _ = _read_magic(file)
    cursor = Cursor(file, byte_order, len(MAGIC) + 4)
    _, num_keys = _read_counts(cursor)
    values = read_metadata(cursor, min(num_keys, _MAX_FIRST_KEYS), TensorBudget()).values
    return tuple(value for key in (ARCHITECTURE_KEY, _TYPE_KEY) if isinstance(value := values.get(key), str))


def _read_counts(cursor: Cursor) -> tuple[int, int]:
    num_tensors, num_keys = cursor.unpack("QQ")
    cursor.check_count("the number of keys", num_keys, MIN_ENTRY_NBYTES)
    cursor.check_count("the number of tensors", num_tensors, _MIN_TENSOR_NBYTES)
    return num_tensors, num_keys


def _read_magic(file: WeightFile) -> tuple[str, int]:
    first = file.read(0, min(8, file.nbytes))
    problem = find_impostor(first)
    if problem:
        raise CheckpointError(file.path, "file", problem)
    if first[:4] != MAGIC[: len(first)]:
        raise CheckpointError(file.path, "file", f"begins with {first[:4]!r}, {MAGIC!r} is needed")
    if file.nbytes < _MIN_NBYTES:
        problem = f"the file is {file.nbytes} bytes long, a header takes at least {_MIN_NBYTES}"
        raise CheckpointError(file.path, "header", problem)
    version = int.from_bytes(first[4:], "little")
    byte_order = "<"
    if not version & 0xFFFF:
        version = int.from_bytes(first[4:], "big")
        byte_order = ">"
    if version not in VERSIONS:
        allowed = " and ".join(map(str, VERSIONS))
        raise CheckpointError(file.path, "version", f"is {version}, {allowed} are read; convert the model anew")
    return byte_order, version


def _read_tensors(cursor: Cursor, count: int, budget: TensorBudget) -> list[RawTensor]:
    types = ggml_types() if count else {}
    tensors: list[RawTensor] = []
    names: set[str] = set()
    for number in range(count):
        cursor.subject, begin = f"tensor {number}", cursor.position
        name = read_name(cursor, _MAX_NAME_NBYTES)
        if name in names:
            raise cursor.error(f"{short_repr(name)} occurs twice, names must be unique")
        names.add(name)
        cursor.subject = name
        tensors.append(_read_tensor(cursor, name, types))
        budget.add_header(cursor.position - begin, cursor.file.path)
        budget.take(TENSOR_NBYTES + getsizeof(name), cursor.file.path, "header")
    return tensors


def _read_tensor(cursor: Cursor, name: str, types: dict[int, GgmlType]) -> RawTensor:
    num_dimensions = cursor.read_u32()
    if num_dimensions > _MAX_DIMENSIONS:
        raise cursor.error(f"has {num_dimensions} dimensions, at most {_MAX_DIMENSIONS} are allowed")
    *sizes, code, offset = cursor.unpack(f"{num_dimensions}QIQ")
    if is_too_large(sizes):
        raise cursor.error(f"shape {short_repr(sizes[::-1])} has 2^63 elements or more, fewer are needed")
    known = types.get(code)
    if known is None:
        raise cursor.error(f"type is {code}, {unknown_type(code)}")
    row = sizes[0] if sizes else 1
    if row % known.block_size:
        problem = f"has rows of {row} elements, {known.name} needs a multiple of {known.block_size}"
        raise cursor.error(problem)
    return RawTensor(name, tuple(sizes), known, offset, prod(sizes[1:]) * known.row_nbytes(row))
