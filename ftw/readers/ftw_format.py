"""The FTW format's names and limits, for whoever reads or writes it; `ftw.readers.ftw` draws its layout."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ftw.errors import CheckpointError
from ftw.tensors import EXPERTS_BANK

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

FORMAT_NAME = "freetoken_weight"
VERSION = 1
ALIGNMENT = 4096  # bytes, of each tensor in the region and of the shards' limit
KINDS = ("weight", EXPERTS_BANK)

INDEX_NAME = "freetoken_weight.json"
SHARD_NAME = "freetoken-{:05}.ftw"
GGUF_METADATA_NAME = "source_metadata.gguf"  # header and key-values of the GGUF that an FTW was made from
STAGING_SUFFIX = ".ftw-partial"  # of the hidden folder that a conversion writes
JOURNAL_NAME = ".ftw-journal"  # of a folder that is being written
# What a folder calls its own files, some also while they are being written; nothing else may have such a name.
OWN_NAMES = re.compile(rf"freetoken-\d{{5,}}\.ftw|({re.escape(INDEX_NAME)}|{re.escape(JOURNAL_NAME)})(\.tmp)?")

MAX_OTHERS = 2 << 20  # characters of an index beside its lists of tensors and shards
MAX_GGUF_METADATA_NBYTES = 256 << 20  # of that copy, which is hashed when it is opened; a model's has some 10 MiB


def check_gguf_metadata_size(path: str | os.PathLike[str], nbytes: int) -> None:
    """Check that the copy of a GGUF's metadata is not larger than a reader takes.

    Raises:
        CheckpointError: It is.
    """
    if nbytes > MAX_GGUF_METADATA_NBYTES:
        problem = f"metadata take {nbytes} bytes, at most {MAX_GGUF_METADATA_NBYTES} are allowed"
        raise CheckpointError(path, "file", problem)


def read_ftw_key(metadata: Mapping[str, Any], key: str) -> Any:
    """Return what an index says under a key of ours, unchecked; None if it says nothing, and for other formats.

    Those have no objects among their metadata.
    """
    own = metadata.get("ftw")
    return own.get(key) if isinstance(own, dict) else None
