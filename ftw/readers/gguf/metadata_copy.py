"""The copy of a GGUF's metadata that lies in an FTW made from it: a GGUF without tensors, readable by every tool.

Header and key-values of the source (of its first shard), byte for byte, but for two counts in the header: no tensors,
and one key more, the last one, which says whether the source held an `output.weight`. Without the list of tensors
nothing else would.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from ftw.readers.base import DerivedFile
from ftw.readers.ftw_format import GGUF_METADATA_NAME
from ftw.readers.gguf.metadata import OUTPUT_WEIGHT_KEY, ValueType

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftw.readers.gguf.reader import GgufReader

_CHUNK_NBYTES = 1 << 20
_HEADER = "4sIQQ"  # magic, version, count of tensors, count of keys


def metadata_copy(reader: GgufReader) -> DerivedFile:
    """Return the copy that belongs beside the weights of an FTW."""
    added = _added_key(reader)
    return DerivedFile(GGUF_METADATA_NAME, reader.metadata_end + len(added), lambda: _iter_copy(reader, added))


def _iter_copy(reader: GgufReader, added: bytes) -> Iterator[bytes]:
    layout = reader.byte_order + _HEADER
    length = struct.calcsize(layout)
    magic, version, _, keys = struct.unpack(layout, reader.header_file.read(0, length))
    yield struct.pack(layout, magic, version, 0, keys + bool(added))
    for offset in range(length, reader.metadata_end, _CHUNK_NBYTES):
        yield reader.header_file.read(offset, min(_CHUNK_NBYTES, reader.metadata_end - offset))
    yield added


def _added_key(reader: GgufReader) -> bytes:
    if OUTPUT_WEIGHT_KEY in reader.metadata:
        return b""
    key = OUTPUT_WEIGHT_KEY.encode()
    value = "output.weight" in reader.tensors
    return struct.pack(f"{reader.byte_order}Q{len(key)}sIB", len(key), key, ValueType.BOOL, value)
