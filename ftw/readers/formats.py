"""The formats that ftw opens: a new one is a file in this room and a row in this table."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

from ftw.errors import CheckpointError, SourceNotFoundError, printable
from ftw.hub import Place, open_weight_file
from ftw.readers.base import FileHead
from ftw.readers.ftw import FtwReader
from ftw.readers.gguf.reader import GgufReader
from ftw.readers.no_checkpoint import describe_no_checkpoint
from ftw.readers.safetensors.reader import SafetensorsReader
from ftw.readers.weight_names import HEAD_NBYTES, list_odd_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ftw.readers.base import Found, Reader

# Asked in this order: an FTW folder may hold safetensors side files, a GGUF one safetensors of another kind.
READERS: dict[str, type[Reader]] = {reader.format: reader for reader in (FtwReader, GgufReader, SafetensorsReader)}
_MAX_NAMED = 5


def find(place: Place) -> Found:
    """Return the checkpoint that lies at a place, of the first format that knows it by names; no header is read.

    Where no name tells a format, first bytes do: those of the file, or of the one file of a folder that has them.

    Raises:
        SourceNotFoundError: No format does.
        CheckpointError: An index is broken, files are missing, or there are several checkpoints.
    """
    with _collector_paused():
        for reader in READERS.values():
            found = reader.find(place)
            if found is not None:
                return found
        odd = _recognise(place)
    if len(odd) > 1:
        names = ", ".join(printable(name) for name in [*odd][:_MAX_NAMED]) + (", …" if len(odd) > _MAX_NAMED else "")
        problem = f"no name tells which file is the model, {len(odd)} begin like one ({names}), name one of them"
        raise CheckpointError(place.folder, "folder", problem)
    if odd:
        return next(iter(odd.values()))
    other = describe_no_checkpoint(place, _is_checkpoint)
    kind, formats = "folder" if place.is_folder else "file", " or ".join(READERS)
    text = f"this {kind} holds none, {formats} is needed" if other is None else other.text
    raise SourceNotFoundError(f"{printable(str(place.path))}: checkpoint: {text}", reason=other and other.reason)


def _is_checkpoint(place: Place) -> bool:
    """Tell whether a place holds a checkpoint, by names and an index."""
    try:
        return any(reader.find(place) is not None for reader in READERS.values())
    except CheckpointError:
        return False


def open_found(found: Found, place: Place) -> Reader:
    """Read the headers of a checkpoint, at the place where it was found, or to which it was fetched.

    Shards of an FTW may be broken: the reader's `problems` say which.

    Raises:
        CheckpointError: Anything else is broken.
    """
    with _collector_paused():
        return found.open(place, found)


def open_reader(path: Path) -> Reader:
    """Open a file or folder of this machine, all of it.

    Raises:
        SourceNotFoundError: It holds no checkpoint.
        CheckpointError: The checkpoint is broken.
    """
    place = Place(path)
    reader = open_found(find(place), place)
    for problem in reader.problems:
        raise problem
    return reader


def _recognise(place: Place) -> dict[str, Found]:
    """Return the files at a place that begin as those of a format do, whatever they are called."""
    odd: dict[str, Found] = {}
    for name in list_odd_files(place):
        try:
            file = open_weight_file(place.path) if not place.is_folder else place.open_file(name)
        except CheckpointError:  # a link that leads out, or no file
            continue
        head = FileHead(name, file.read(0, min(file.nbytes, HEAD_NBYTES)), file.nbytes)
        found = next(filter(None, (reader.recognise(head) for reader in READERS.values())), None)
        if found is not None:
            odd[name] = found
    return odd


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
