"""The key-values of one GGUF file.

field      bytes
length     8, of the key
key        length, UTF-8
type       4, a `ValueType`
value      1, 2, 4 or 8 for numbers; 1 for a bool, 0 or 1; a string as a key; for an array:
  type       4, of its elements
  count      8
  elements   as values are, one after another, arrays too

Arrays stay in the file until they are asked for, and so do texts of more than 1 MiB, as a tokenizer is one. What is not
UTF-8 in a text, as a model's name may be, is kept as a backslashed escape; keys and the architecture have to be UTF-8.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass
from enum import IntEnum
from sys import getsizeof
from typing import TYPE_CHECKING, Any, NamedTuple

from ftw.files import MAX_DEPTH, short_repr
from ftw.readers.gguf.cursor import Cursor

if TYPE_CHECKING:
    from pathlib import Path

    from ftw.files import WeightFile
    from ftw.readers.tensor_budget import TensorBudget

MIN_ENTRY_NBYTES = 8 + 1 + 4 + 1
MAX_KEYS = 1 << 15  # a model has less than a hundred
MAX_KEY_NBYTES = 65535
MAX_TEXT_NBYTES = 1 << 20  # of a text that is kept; as a Python object it takes up to four times as much
_KEY_NBYTES = 200  # of a key-value beside both; of an array more, of a number less
MAX_ALIGNMENT = 1 << 20
# Elements of all arrays of a model that are passed over one by one: a sparse file could have any number of them. The
# longest vocabulary has 262,144 tokens and 514,000 merges; no model has arrays in arrays.
MAX_STRINGS = 1 << 22
MAX_ARRAYS = 1 << 16
ALIGNMENT_KEY = "general.alignment"
ARCHITECTURE_KEY = "general.architecture"
# What a conversion to FTW adds to the copy of the metadata that it leaves beside the weights.
OUTPUT_WEIGHT_KEY = "freetoken.output_weight_present"


class ValueType(IntEnum):
    """How a value is encoded."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


# The struct module's letters; bools are bytes until they are checked.
_NUMBERS: dict[ValueType, str] = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "B",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}
_MIN_NBYTES: dict[ValueType, int] = {
    **{kind: struct.calcsize("<" + letter) for kind, letter in _NUMBERS.items()},
    ValueType.STRING: 8,
    ValueType.ARRAY: 12,
}
_ESCAPED = "backslashreplace"
_MAX_WALKED: dict[ValueType, int] = {ValueType.STRING: MAX_STRINGS, ValueType.ARRAY: MAX_ARRAYS}


class GgufMetadata(NamedTuple):
    """The key-values of a file, and how each value is encoded."""

    values: dict[str, Any]
    types: dict[str, ValueType]


@dataclass(frozen=True, slots=True)
class MetadataText:
    """A long text of the metadata, left in the file until it is asked for.

    Attributes:
        file: The file that holds it.
        key: Its key.
        nbytes: Its length.
        offset: Where it begins in the file.
    """

    file: WeightFile
    key: str
    nbytes: int
    offset: int

    def read(self) -> str:
        """Read it; what is not UTF-8 becomes backslashed escapes.

        Raises:
            CheckpointError: The file has changed.
        """
        return self.file.read(self.offset, self.nbytes).decode(errors=_ESCAPED)


@dataclass(frozen=True, slots=True)
class MetadataArray:
    """An array of the metadata, left in the file until it is asked for.

    Attributes:
        file: The file that holds it.
        byte_order: "<" or ">".
        key: Its key.
        element_type: Name of a `ValueType`.
        count: Number of its elements, which `len` returns too.
        offset: Where its first element begins in the file.
    """

    file: WeightFile
    byte_order: str
    key: str
    element_type: str
    count: int
    offset: int

    def __len__(self) -> int:
        return self.count

    def read(self) -> list[Any]:
        """Read its elements: arrays as lists, strings with what is not UTF-8 in them as backslashed escapes.

        Raises:
            CheckpointError: A bool is neither 0 nor 1, or the file has changed.
        """
        cursor = Cursor(self.file, self.byte_order, self.offset)
        cursor.subject = self.key
        elements: list[Any] = []
        pending = [(elements, ValueType[self.element_type], self.count)]
        while pending:
            items, kind, left = pending.pop()
            if kind is not ValueType.ARRAY:
                items.extend(_read_elements(cursor, kind, left))
            elif left:
                items.append([])
                pending += [(items, kind, left - 1), (items[-1], *_read_array_head(cursor, Counter()))]
        return elements


def read_metadata(cursor: Cursor, count: int, budget: TensorBudget) -> GgufMetadata:
    """Read and check `count` key-values.

    Raises:
        CheckpointError: One breaks the format in any way, or they take more memory than the budget has.
    """
    metadata = GgufMetadata({}, {})
    if count > MAX_KEYS:
        raise cursor.error(f"the number of keys is {count}, at most {MAX_KEYS} are allowed")
    for number in range(count):
        cursor.subject, begin = f"key {number}", cursor.position
        key = read_name(cursor, MAX_KEY_NBYTES)
        if key in metadata.values:
            raise cursor.error(f"{short_repr(key)} occurs twice, keys must be unique")
        cursor.subject = key
        kind = metadata.types[key] = _read_type(cursor)
        value = metadata.values[key] = _read_value(cursor, key, kind, budget)
        kept = len(key) if isinstance(value, (MetadataArray, MetadataText)) else None
        _count_bytes(cursor.position - begin, kept, budget, cursor.file.path)
        budget.take(_KEY_NBYTES + getsizeof(key) + getsizeof(value), cursor.file.path, "header")
        if key == ALIGNMENT_KEY:
            _check_alignment(cursor, kind, value)
        elif key == ARCHITECTURE_KEY and not (kind is ValueType.STRING and value):
            found = "is empty" if kind is ValueType.STRING else f"is a {kind.name}"
            raise cursor.error(f"{found}, the name of an architecture is needed")
    return metadata


def _count_bytes(nbytes: int, kept: int | None, budget: TensorBudget, path: Path) -> None:
    """Count the bytes of a key-value; of one that stays in the file, those of its key alone are kept."""
    budget.add_header(nbytes if kept is None else kept, path)
    budget.add_skipped(0 if kept is None else nbytes - kept, path)


def read_name(cursor: Cursor, most: int) -> str:
    """Read a key, or a tensor's name, of `most` bytes.

    Raises:
        CheckpointError: It is empty, too long, or not UTF-8.
    """
    length = cursor.read_u64()
    if not length:
        raise cursor.error("its name is empty")
    if length > most:
        raise cursor.error(f"its name is {length} bytes long, at most {most} are allowed")
    return _decode(cursor, cursor.read_bytes(length), "its name")


def _read_type(cursor: Cursor) -> ValueType:
    code = cursor.read_u32()
    try:
        return ValueType(code)
    except ValueError:
        raise cursor.error(f"value type is {code}, allowed are 0 to {max(ValueType)}") from None


def _read_value(cursor: Cursor, key: str, kind: ValueType, budget: TensorBudget) -> Any:
    if kind is ValueType.STRING:
        return _read_text(cursor, key)
    if kind is ValueType.ARRAY:
        element_type, count = _read_array_head(cursor, budget.num_walked)
        array = MetadataArray(cursor.file, cursor.byte_order, key, element_type.name, count, cursor.position)
        _skip_elements(cursor, element_type, count, budget.num_walked)
        return array
    return _read_elements(cursor, kind, 1)[0]


def _read_text(cursor: Cursor, key: str) -> str | MetadataText:
    length = cursor.read_u64()
    if length > cursor.remaining:
        raise cursor.error(f"is a string of {length} bytes, but only {cursor.remaining} bytes follow")
    if key == ARCHITECTURE_KEY:
        if length > MAX_KEY_NBYTES:
            raise cursor.error(f"is a string of {length} bytes, at most {MAX_KEY_NBYTES} are allowed")
        return _decode(cursor, cursor.read_bytes(length), "its text")
    if length <= MAX_TEXT_NBYTES:
        return cursor.read_bytes(length).decode(errors=_ESCAPED)
    text = MetadataText(cursor.file, key, length, cursor.position)
    cursor.skip(length)
    return text


def _read_array_head(cursor: Cursor, num_walked: Counter[str]) -> tuple[ValueType, int]:
    """Read what the elements of an array are and how many; `num_walked` counts those that are passed over singly."""
    kind = _read_type(cursor)
    count = cursor.read_u64()
    cursor.check_count("its number of elements", count, _MIN_NBYTES[kind])
    if kind in _MAX_WALKED:
        num_walked[kind.name] += count
        if num_walked[kind.name] > _MAX_WALKED[kind]:
            found = f"is an array of {count} {kind.name} elements, {num_walked[kind.name]} in all arrays up to here"
            raise cursor.error(f"{found}, at most {_MAX_WALKED[kind]} are allowed")
    return kind, count


def _skip_elements(cursor: Cursor, kind: ValueType, count: int, num_walked: Counter[str]) -> None:
    """Pass over the elements of an array, and of those in it, by a list instead of by recursion."""
    pending = [(kind, count)]
    while pending:
        kind, left = pending.pop()
        if kind is ValueType.STRING:
            cursor.skip_strings(left)
        elif kind is not ValueType.ARRAY:
            cursor.skip(left * _MIN_NBYTES[kind])
        elif left:
            pending += [(kind, left - 1), _read_array_head(cursor, num_walked)]
            if len(pending) > MAX_DEPTH:
                raise cursor.error(f"its arrays are nested more than {MAX_DEPTH} levels deep")


def _read_elements(cursor: Cursor, kind: ValueType, count: int) -> list[Any]:
    if kind is ValueType.STRING:
        return [cursor.read_bytes(cursor.read_u64()).decode(errors=_ESCAPED) for _ in range(count)]
    data = cursor.read_bytes(count * _MIN_NBYTES[kind])
    values = list(struct.unpack(f"{cursor.byte_order}{count}{_NUMBERS[kind]}", data))
    if kind is not ValueType.BOOL:
        return values
    if max(values, default=0) > 1:
        raise cursor.error(f"holds a bool of {max(values)}, 0 or 1 is needed")
    return list(map(bool, values))


def _decode(cursor: Cursor, text: bytes, what: str) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise cursor.error(f"{what} is not UTF-8 at byte {error.start}") from error


def _check_alignment(cursor: Cursor, kind: ValueType, value: Any) -> None:
    if kind is not ValueType.UINT32:
        raise cursor.error(f"is a {kind.name}, a UINT32 is needed")
    if not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise cursor.error(f"is {value}, a power of two from 1 to {MAX_ALIGNMENT} is needed")
