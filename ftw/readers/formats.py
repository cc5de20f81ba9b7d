"""The formats that ftw opens: a new one is a file in this room and a row in this table."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

from ftw.errors import SourceNotFoundError, printable
from ftw.readers.ftw import FtwReader
from ftw.readers.gguf.reader import GgufReader
from ftw.readers.safetensors import SafetensorsReader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ftw.readers.base import Reader

# Asked in this order: an FTW folder may hold safetensors side files, a GGUF one safetensors of another kind.
READERS: dict[str, type[Reader]] = {reader.format: reader for reader in (FtwReader, GgufReader, SafetensorsReader)}


def open_reader(path: Path) -> Reader:
    """Open a file or folder with the first reader that accepts it.

    Raises:
        SourceNotFoundError: No reader does.
        CheckpointError: The checkpoint is broken.
    """
    for reader in READERS.values():
        if reader.accepts(path):
            with _collector_paused():
                return reader(path)
    formats = " or ".join(READERS)
    kind = "folder" if path.is_dir() else "file"
    raise SourceNotFoundError(f"{printable(str(path))}: checkpoint: this {kind} holds none, {formats} is needed")


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep the garbage collector from walking, again and again, what a header of 100,000 tensors becomes."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
