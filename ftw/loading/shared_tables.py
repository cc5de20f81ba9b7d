"""Shared tables: rows that all processes of this host map, filled by the first of them.

Whose rows they are is told by the state of the files that hold them, which no stranger can give to a file of his own.
Checksums that a checkpoint records are no such sign: its publisher writes them, and makes bytes to fit a xxh3 at will.
What another process has filled in is compared with the own file, by samples; that finds accidents alone.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

import xxhash

from ftw.errors import CheckpointError, SharedMemoryError, printable
from ftw.host.shared import open_segment
from ftw.pinned import check_pin_budget

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftw.checkpoint import Checkpoint
    from ftw.files import WeightFile
    from ftw.host.shared import SharedSegment
    from ftw.loading.options import LoadOptions
    from ftw.loading.table_rows import TableRows

_NUM_SAMPLES = 16
_SAMPLE_NBYTES = 16 << 10


def open_shared_rows(
    checkpoint: Checkpoint, part: TableRows, options: LoadOptions, fill: Callable[[memoryview], None]
) -> SharedSegment:
    """Open the memory that the processes of this host share for these rows; the first of them calls `fill`.

    Raises:
        CheckpointError: What was read is not what the recorded checksum says.
        PinError: There is no room.
        SharedMemoryError: The memory holds another table, or there is no room for it.
    """

    def fill_and_check(view: memoryview) -> None:
        fill(view)
        if not options.is_dummy:
            _check_sums(checkpoint, part, view)

    def check(view: memoryview) -> None:
        if not options.is_dummy:
            _check_samples(checkpoint, part, view)

    def check_room(nbytes: int) -> None:
        check_pin_budget({part.table.name: nbytes}, checkpoint.source, options.max_pinned_bytes)

    return open_segment(
        _identity(checkpoint, part, is_dummy=options.is_dummy),
        part.nbytes,
        fill_and_check,
        name=part.table.name,
        check=check,
        check_room=check_room,
        huge_pages=options.huge_pages,
    )


def _identity(checkpoint: Checkpoint, part: TableRows, *, is_dummy: bool) -> str:
    """Return what sets a table's content apart from others: the state of the files that hold it, and the place in them.

    A table may have any number of tensors, and an identity is short, so that it has but a digest of them: one that
    nobody can make two lists for, since names and shapes are a stranger's choice.
    """
    files: dict[int, list[int]] = {}
    tensors = []
    for tensor in part.tensors:
        entry: dict[str, Any] = {"dtype": tensor.dtype, "shape": tensor.shape, "ggml_type": part.as_one.ggml_type}
        extents = () if is_dummy else checkpoint.extents(tensor.name)
        for extent in extents:
            if extent.file not in files:
                files[extent.file] = _state_of(checkpoint.files[extent.file])
        tensors.append({**entry, "extents": extents})
    digest = hashlib.sha256(json.dumps([sorted(files.items()), tensors]).encode()).hexdigest()
    kind = {"dtype": part.as_one.dtype, "shape": part.as_one.shape}
    return json.dumps({"table": part.table.name, **kind, "is_dummy": is_dummy, "tensors": digest})


def _state_of(file: WeightFile) -> list[int]:
    """Return the state of a file: what readers compare, and the time of its last change of any kind.

    That time tells a file that was rewritten in place, or that has the number of one that was deleted, from what was
    there: anyone can set the time of the last writing of a file of his own, but nobody sets this one. Readers do not
    compare it, since another mode, name or link changes it too: here that costs no more than a second segment.

    Raises:
        CheckpointError: The file is another one than was opened.
    """
    status, seen = os.stat(file.path), file.identity
    found = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    if found != (seen.device, seen.inode, seen.nbytes, seen.mtime_ns):
        raise CheckpointError(file.path, "file", "changed while it was being read")
    return [*found, status.st_ctime_ns]


def _check_sums(checkpoint: Checkpoint, part: TableRows, view: memoryview) -> None:
    """Compare what was read with recorded checksums: other processes will rely on it."""
    for tensor, cut, _ in part.iter_cuts(view):
        found = xxhash.xxh3_64(cut).hexdigest() if tensor.xxh3_64 else None
        if found != tensor.xxh3_64:
            problem = f"checksum is {found}, the index says {tensor.xxh3_64}"
            raise CheckpointError(checkpoint.source, tensor.name, problem)


def _check_samples(checkpoint: Checkpoint, part: TableRows, view: memoryview) -> None:
    """Compare samples of what another process has filled in with the own file."""
    for tensor, cut, _ in part.iter_cuts(view):
        sample = bytearray(min(_SAMPLE_NBYTES, tensor.nbytes))
        last = tensor.nbytes - len(sample)
        for offset in sorted({last * number // (_NUM_SAMPLES - 1) for number in range(_NUM_SAMPLES)}):
            checkpoint.read_into(tensor.name, sample, offset=offset)
            if sample != cut[offset : offset + len(sample)]:
                what = f"{printable(checkpoint.source)}: {printable(tensor.name)}"
                problem = f"shared memory of this host holds other bytes at {offset}, from an older state of the file"
                raise SharedMemoryError(f"{what}: {problem}; end the processes that use it")
