"""Readers: the headers of a checkpoint of each format, parsed and checked against its files. No weight is read.

A new format is a file in this room and a row in `ftw.readers.formats`. Imports: `ftw.files`, `ftw.hub`. No torch.
"""

from ftw.readers.base import DerivedFile, Found, LeftOut, Reader
from ftw.readers.formats import find, open_found, open_reader
from ftw.readers.ftw_format import (
    ALIGNMENT,
    FORMAT_NAME,
    GGUF_METADATA_NAME,
    INDEX_NAME,
    JOURNAL_NAME,
    MAX_OTHERS,
    OWN_NAMES,
    SHARD_NAME,
    STAGING_SUFFIX,
    VERSION,
    check_gguf_metadata_size,
    read_ftw_key,
)
from ftw.readers.problems import Problems

__all__ = [
    "ALIGNMENT", "FORMAT_NAME", "GGUF_METADATA_NAME", "INDEX_NAME", "JOURNAL_NAME", "MAX_OTHERS", "OWN_NAMES",
    "SHARD_NAME", "STAGING_SUFFIX", "VERSION", "DerivedFile", "Found", "LeftOut", "Problems", "Reader",
    "check_gguf_metadata_size", "find", "open_found", "open_reader", "read_ftw_key",
]  # fmt: skip
