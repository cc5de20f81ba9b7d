"""Host tables: lookup tables of a checkpoint, put into page-locked host memory.

    plan        is there room, and does the caller's limit allow it? before a byte is read
    take        exact memory for each table: its own, or what the processes of the host share
    fill        all tables at once, from their files straight into that memory; or with dummy values
    page-lock   the memory as it is, so that no page is touched twice

Of a table that is cut by its rows, a shard for each rank of a group or a range of the caller's, only the rows that this
process holds are read. Whatever fails gives everything back.
"""

from __future__ import annotations

import contextlib
import json
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash

from ftw.checkpoint import TOKEN_EMBEDDING
from ftw.errors import CheckpointError, SharedMemoryError, printable
from ftw.ggml_types import PACKED_TYPES
from ftw.host import PAGE_NBYTES, HostLimits, read_host_limits
from ftw.host.shared import open_segment
from ftw.kernels import prepare
from ftw.loading.device_copy import as_tensor
from ftw.loading.dummy import fill_dummy
from ftw.loading.per_layer import count_slices
from ftw.loading.table_rows import TableRows, count_rows, rank_range, token_range
from ftw.lookup import HostEmbedding, ShardedEmbedding
from ftw.pinned import PinnedBuffer, check_pin_budget, count_pinned_bytes
from ftw.sizes import align_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch.distributed import ProcessGroup

    from ftw.checkpoint import Checkpoint
    from ftw.host.shared import SharedSegment
    from ftw.verdict import TableVerdict

_NUM_SAMPLES = 16
_SAMPLE_NBYTES = 16 << 10
_NOT_ASKED = HostLimits(None, None, None, is_wsl=False)

_log = logging.getLogger("ftw")


class HostOptions(NamedTuple):
    """How tables are put into host memory.

    Attributes:
        is_shared: One copy for all processes of this host.
        is_dummy: Random values instead of the file's.
        max_pinned_bytes: Page-locked bytes that tables may bring the process to; None for what the host has.
        huge_pages: Ask for pages of 2 MiB.
        num_threads: That read at a time; None for as many as there are processors, but 6 to 8.
        group: Over whose ranks every table is spread, by its rows.
        vocab_range: `(start, length)` of the token ids whose rows are wanted.
        hot_bytes: Of the token embedding's most used rows, which the device keeps.
        scale: What the rows of the token embedding are multiplied by.
    """

    is_shared: bool = False
    is_dummy: bool = False
    max_pinned_bytes: int | None = None
    huge_pages: bool = True
    num_threads: int | None = None
    group: ProcessGroup | None = None
    vocab_range: tuple[int, int] | None = None
    hot_bytes: int | None = None
    scale: float | None = None


def load_host_tables(
    checkpoint: Checkpoint,
    tables: Iterable[TableVerdict],
    device: torch.device,
    dtype: torch.dtype | None,
    options: HostOptions,
) -> dict[str, HostEmbedding | ShardedEmbedding]:
    """Put tables into host memory that the device reads; return them by name. Close each.

    Raises:
        CheckpointError: A file is broken, or has changed.
        PinError: There is no room, or the driver refuses.
        SharedMemoryError: The host's copy is another table, or there is no room for it.
    """
    parts = {table.name: TableRows(checkpoint, table, _rows_of(table, options)) for table in tables}
    if options.is_shared and not parts:
        _log.info("%s: share='node': no table leaves the GPU, so none is shared", printable(checkpoint.source))
    asked = {name: align_up(part.nbytes, PAGE_NBYTES) for name, part in parts.items()}
    # What is shared may be there already; who has to fill it looks for room then.
    _check_room(checkpoint, asked, options, _NOT_ASKED if options.is_shared else read_host_limits())
    with contextlib.ExitStack() as stack:
        buffers: dict[str, PinnedBuffer] = {}
        for name, part in parts.items():
            memory = _open_shared(checkpoint, part, options) if options.is_shared else None
            buffers[name] = PinnedBuffer(
                part.nbytes, name=name, device=device, huge_pages=options.huge_pages, memory=memory
            )
            stack.callback(buffers[name].close)
        if not options.is_shared:
            _fill(checkpoint, [(part, buffers[name].view()) for name, part in parts.items()], options)
        embeddings: dict[str, HostEmbedding | ShardedEmbedding] = {}
        for name, part in parts.items():
            buffers[name].pin(device)
            rows = as_tensor(checkpoint, part.as_one, buffers[name].view())
            own: dict[str, Any] = {"buffer": buffers[name], "vocab_range": part.rows}
            if part.table.role == TOKEN_EMBEDDING:
                own.update(hot_bytes=options.hot_bytes, scale=options.scale)
            embedding = make_embedding(checkpoint, part.table, rows, device, dtype, **own)
            embeddings[name] = _spread(embedding, part.table, options.group)
        stack.pop_all()  # all went well: the embeddings close the memory from here on
    return embeddings


def make_embedding(
    checkpoint: Checkpoint,
    table: TableVerdict,
    rows: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype | None,
    **options: Any,
) -> HostEmbedding:
    """Return a table as a module, without padding rows at its end, ready to be captured in a CUDA graph."""
    ggml_type = table.dtype if table.dtype in PACKED_TYPES else None
    if ggml_type is not None:
        prepare(ggml_type, device)
    return HostEmbedding(
        rows[: table.rows],
        name=table.name,
        dtype=dtype,
        ggml_type=ggml_type,
        num_slices=count_slices(table, checkpoint.config),
        device=device,
        **options,
    )


def _spread(
    embedding: HostEmbedding, table: TableVerdict, group: ProcessGroup | None
) -> HostEmbedding | ShardedEmbedding:
    return embedding if group is None else ShardedEmbedding(embedding, count_rows(table), group)


def _rows_of(table: TableVerdict, options: HostOptions) -> tuple[int, int] | None:
    """Return `(start, length)` of the rows of a table that this process holds; None for all."""
    if options.group is not None:
        return rank_range(table, options.group.rank(), options.group.size())
    return token_range(table, options.vocab_range)


def _check_room(checkpoint: Checkpoint, asked: Mapping[str, int], options: HostOptions, limits: HostLimits) -> None:
    check_pin_budget(
        asked,
        pinned_nbytes=count_pinned_bytes(),
        max_pinned_bytes=options.max_pinned_bytes,
        limits=limits,
        source=checkpoint.source,
    )


def _fill(checkpoint: Checkpoint, targets: Iterable[tuple[TableRows, memoryview]], options: HostOptions) -> None:
    if options.is_dummy:
        for part, view in targets:
            if part.nbytes:
                fill_dummy(torch.frombuffer(view, dtype=torch.uint8), part.as_one)
        return
    cuts = [cut for part, view in targets for cut in part.iter_cuts(view)]
    requests = [(tensor.name, view, offset) for tensor, view, offset in cuts]
    checkpoint.read_many(requests, num_threads=options.num_threads)


def _open_shared(checkpoint: Checkpoint, part: TableRows, options: HostOptions) -> SharedSegment:
    def fill(view: memoryview) -> None:
        _fill(checkpoint, [(part, view)], options)
        if not options.is_dummy:
            _check_sums(checkpoint, part, view)

    def check(view: memoryview) -> None:
        if not options.is_dummy:
            _check_samples(checkpoint, part, view)

    def check_room(nbytes: int) -> None:
        _check_room(checkpoint, {part.table.name: nbytes}, options, read_host_limits())

    return open_segment(
        _identity(checkpoint, part, is_dummy=options.is_dummy),
        part.nbytes,
        fill,
        name=part.table.name,
        check=check,
        check_room=check_room,
        huge_pages=options.huge_pages,
    )


def _identity(checkpoint: Checkpoint, part: TableRows, *, is_dummy: bool) -> str:
    """Return what tells a table's content from every other: by checksum, or by the state of the files that hold it.

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
    """Hold what was read against recorded checksums: other processes will take it for that."""
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
