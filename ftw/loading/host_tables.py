"""Host tables: lookup tables of a checkpoint, put into page-locked host memory.

    plan        is there room, and does the caller's limit allow it? before a byte is read
    take        exact memory for each table: its own, or what the processes of the host share
    fill        all tables at once, from their files straight into that memory; or with dummy values
    page-lock   the memory as it is, so that no page is touched twice

If a table is cut by its rows, only the rows that this process holds are read. Whatever fails gives everything back.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import torch

from ftw.errors import printable
from ftw.host import HostLimits
from ftw.loading.device_copy import torch_dtype
from ftw.loading.dummy import fill_dummy
from ftw.loading.options import LoadOptions, row_options
from ftw.loading.shared_tables import open_shared_rows
from ftw.loading.table_rows import TableRows, count_rows, rank_range, token_range
from ftw.lookup import HostEmbedding, ShardedEmbedding, make_embedding
from ftw.pinned import PinnedBuffer, check_pin_budget, tensor_over

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ftw.checkpoint import Checkpoint
    from ftw.verdict import TableVerdict

_NOT_ASKED = HostLimits(None, None, None, is_wsl=False)

_log = logging.getLogger("ftw")


def load_host_tables(
    checkpoint: Checkpoint, tables: Iterable[TableVerdict], options: LoadOptions
) -> dict[str, HostEmbedding]:
    """Put tables into host memory that the device reads; return them by name. Close each.

    Raises:
        CheckpointError: A file is broken, or has changed.
        PinError: There is no room, or the driver refuses.
        SharedMemoryError: The host's copy is another table, or there is no room for it.
    """
    parts = {table.name: TableRows(checkpoint, table, _rows_of(table, options)) for table in tables}
    if options.is_shared and not parts:
        _log.info("%s: share='node': no table leaves the GPU, so none is shared", printable(checkpoint.source))
    asked = {name: part.nbytes for name, part in parts.items()}
    # What is shared may be there already; who has to fill it looks for room then.
    limits = _NOT_ASKED if options.is_shared else None
    check_pin_budget(asked, checkpoint.source, options.max_pinned_bytes, limits=limits)
    with contextlib.ExitStack() as stack:
        buffers: dict[str, PinnedBuffer] = {}
        for name, part in parts.items():
            buffers[name] = _take(checkpoint, part, options)
            stack.callback(buffers[name].close)
        if not options.is_shared:
            _fill(checkpoint, [(part, buffers[name].view()) for name, part in parts.items()], options)
        embeddings = {name: _embed(checkpoint, part, buffers[name], options) for name, part in parts.items()}
        stack.pop_all()  # all went well: the embeddings close the memory from here on
    return embeddings


def _rows_of(table: TableVerdict, options: LoadOptions) -> tuple[int, int] | None:
    """Return `(start, length)` of the rows of a table that this process holds; None for all."""
    if options.group is not None:
        return rank_range(table, options.group.rank(), options.group.size())
    return token_range(table, options.vocab_range)


def _take(checkpoint: Checkpoint, part: TableRows, options: LoadOptions) -> PinnedBuffer:
    """Return memory for rows; what processes share is filled already."""
    memory = None
    if options.is_shared:
        memory = open_shared_rows(checkpoint, part, options, lambda view: _fill(checkpoint, [(part, view)], options))
    name, device = part.table.name, options.device
    return PinnedBuffer(part.nbytes, name=name, device=device, huge_pages=options.huge_pages, memory=memory)


def _fill(checkpoint: Checkpoint, targets: Iterable[tuple[TableRows, memoryview]], options: LoadOptions) -> None:
    if options.is_dummy:
        for part, view in targets:
            if part.nbytes:
                fill_dummy(torch.frombuffer(view, dtype=torch.uint8), part.as_one)
        return
    cuts = [cut for part, view in targets for cut in part.iter_cuts(view)]
    requests = [(tensor.name, view, offset) for tensor, view, offset in cuts]
    checkpoint.read_many(requests, num_threads=options.num_threads)


def _embed(checkpoint: Checkpoint, part: TableRows, buffer: PinnedBuffer, options: LoadOptions) -> HostEmbedding:
    """Page-lock rows, and return the module that looks them up, without padding rows at the end of the table."""
    buffer.pin(options.device)
    table, as_one = part.table, part.as_one
    rows = tensor_over(buffer.view(), torch_dtype(checkpoint, as_one), as_one.shape)[: table.rows]
    own = row_options(table, checkpoint.config, options, part.rows)
    embedding = make_embedding(rows, table.name, options.device, own, buffer)
    return embedding if options.group is None else ShardedEmbedding(embedding, count_rows(table), options.group)
