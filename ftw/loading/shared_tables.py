"""Shared tables: rows that all processes of this host map, filled by the first of them.

What another process has filled in is compared with the own file, by samples.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import xxhash

from ftw.errors import CheckpointError, SharedMemoryError, printable
from ftw.host.shared import open_segment
from ftw.pinned import check_pin_budget

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftw.checkpoint import Checkpoint
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
    """Return what sets a table's content apart from others: by checksum, or by the state of the files that hold it.

    A table may have any number of tensors, and an identity is short, so that it has but a digest of them.
    """
    tensors = []
    for tensor in part.tensors:
        entry: dict[str, Any] = {"dtype": tensor.dtype, "shape": tensor.shape, "ggml_type": part.as_one.ggml_type}
        if not is_dummy and tensor.xxh3_64:
            entry["xxh3_64"] = tensor.xxh3_64
        elif not is_dummy:
            entry["files"] = [
                [*checkpoint.files[extent.file].identity, extent.offset, extent.nbytes]
                for extent in checkpoint.extents(tensor.name)
            ]
        tensors.append(entry)
    digest = xxhash.xxh3_128_hexdigest(json.dumps(tensors).encode())
    kind = {"dtype": part.as_one.dtype, "shape": part.as_one.shape}
    return json.dumps({"table": part.table.name, **kind, "is_dummy": is_dummy, "tensors": digest})


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
