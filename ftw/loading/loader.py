"""Loading: lookup tables straight into pinned host memory, every other tensor to the device on demand."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from ftw.checkpoint import open_checkpoint
from ftw.errors import printable
from ftw.loading.host_tables import load_host_tables
from ftw.loading.loaded_model import LoadedModel
from ftw.loading.options import LoadOptions, parse_dtype
from ftw.loading.ranks import all_or_none, resolve_group
from ftw.loading.table_rows import check_vocab_range
from ftw.pinned import MemoryMonitor, resolve_device
from ftw.sizes import parse_nbytes
from ftw.verdict import judge, plan_placement

if TYPE_CHECKING:
    import os

    import torch
    from torch.distributed import ProcessGroup

    from ftw.checkpoint import Checkpoint


_log = logging.getLogger("ftw")


def load(
    source: str | os.PathLike[str],
    *,
    embed: str = "gpu",
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    share: str | None = None,
    dummy: bool = False,
    max_pinned_bytes: int | str | None = None,
    huge_pages: bool = True,
    num_threads: int | None = None,
    tp: ProcessGroup | bool | None = None,
    vocab_range: tuple[int, int] | None = None,
    hot_bytes: int | str | None = None,
    scale: float | None = None,
    decode_df11: bool = False,
    follow_links: bool = False,
) -> LoadedModel:
    """Load a checkpoint for serving.

    Args:
        source: A path or a hub id.
        embed: "host" puts the lookup tables into pinned host memory, "auto" does so where it is allowed and says why
            not where it isn't, "gpu" leaves them among the weights.
        device: Where the weights go and lookups run; None for the current GPU, or the CPU on a machine without one.
        dtype: Of the rows that lookups return, a dtype of torch or its name, such as "bfloat16"; None for the table's
            own, of a packed one bfloat16.
        share: "node" holds host tables once for all processes of this user on this host that load them so: the first
            fills shared memory, the others take it, the last one's end frees it.
        dummy: Make tables and weights of random values instead of reading them, in the encodings, shapes and places of
            the real ones. Of a hub id headers alone are read; tensors are only where a verdict takes their bytes.
        max_pinned_bytes: Page-locked bytes that tables may bring this process to, as bytes or as a size such as "8GiB".
            None for what the host has available; a limit of yours takes the place of that, as some hosts' memory grows
            with use. What `weights` page-locks for as long as it runs, 32 MiB, comes on top. With embed="gpu" there is
            nothing else to be page-locked, and every limit holds.
        huge_pages: Ask for pages of 2 MiB for large tables; on some kernels their allocation is slow.
        num_threads: How many threads read tables, at most 64; None for as many as there are processors, but 6 to 8.
        tp: Spread host tables by their rows over the ranks of this group, True for the default one: each reads and
            page-locks its own, and a lookup, which all ranks do together, ends in an all_reduce. All ranks load
            together, too, and fail together, but for a device or a group that one of them lacks. A table that stays on
            the GPU is whole on each.
        vocab_range: `(start, length)`, for an engine with collectives of its own: read only the rows of these token
            ids; every other id gives zeros. Holds for token and per-layer embeddings; n-gram tables stay whole.
        hot_bytes: Keep the rows of the token embedding that are used most on the device, as many as fit into these
            bytes, or a size such as "64MiB"; lookups count, and `embedding.update_hot_rows()` chooses. Where "auto"
            leaves it on the GPU it has none.
        scale: Multiply the rows of the token embedding by this, as the model does after its lookup (Gemma: the square
            root of the hidden size); None for rows as they are stored.
        decode_df11: Decode lookup tables that are stored as DF11 to plain bf16 ones, which may leave the GPU.
        follow_links: Follow links that lead out of the checkpoint's folder, as `open_checkpoint` does.

    Raises:
        FtwError: With `tp`, another rank could not load.
        NotEligibleError: `embed` is "host" and the token embedding may not leave the GPU.
        SourceNotFoundError: There is no checkpoint of that name.
        CheckpointError: It is broken.
        PinError: The tables don't fit into host memory or the limit, or the driver refused to page-lock one.
        SharedMemoryError: Shared memory holds another table in its place, or has no room.
        DeviceError: torch has no such device.
        ValueError: `embed` or `share` is none of its choices, `dtype` no floating-point type of torch,
            `max_pinned_bytes` or `hot_bytes` no size, `num_threads` no whole number from 1 to 64, `tp` no group of this
            process, `vocab_range` outside of the table, or one of these stands beside what it cannot go with.
    """
    group = resolve_group(tp)
    where = resolve_device(device)
    with contextlib.ExitStack() as stack:
        with all_or_none(group, where, str(source)):
            options = LoadOptions(
                embed=embed,
                device=where,
                dtype=parse_dtype(dtype),
                share=share,
                is_dummy=dummy,
                max_pinned_bytes=parse_nbytes("max_pinned_bytes", max_pinned_bytes),
                huge_pages=huge_pages,
                num_threads=num_threads,
                group=group,
                vocab_range=vocab_range,
                hot_bytes=parse_nbytes("hot_bytes", hot_bytes),
                scale=scale,
            )
            checkpoint = stack.enter_context(
                open_checkpoint(source, headers_only=dummy, decode_df11=decode_df11, follow_links=follow_links)
            )
            model = load_opened(checkpoint, options, stack)
        stack.pop_all()
    return model


def load_opened(checkpoint: Checkpoint, options: LoadOptions, undo: contextlib.ExitStack) -> LoadedModel:
    """Load a checkpoint that is open, and that the model closes; `undo` gives back what else was taken.

    Errors are those of `load`.
    """
    source = printable(checkpoint.source)
    verdict = judge(checkpoint)
    for warning in verdict.warnings:
        _log.warning("%s: %s", source, printable(warning))
    if options.vocab_range is not None:
        check_vocab_range(verdict.token_embedding, options.vocab_range)
    placement = plan_placement(verdict, options.embed, checkpoint.source)
    if options.embed == "auto" and placement.placement == "gpu":
        _log.warning("%s: the token embedding stays on the GPU: %s", source, printable(placement.reason))
    with MemoryMonitor(options.device) as monitor:
        tables = load_host_tables(checkpoint, placement.host_tables, options)
        for table in tables.values():
            undo.callback(table.close)
        is_gpu = options.device.type == "cuda"
        nbytes = {name: table.pinned_nbytes if is_gpu else table.table.nbytes for name, table in tables.items()}
        report = monitor.report(placement.placement, placement.reason, nbytes)
    return LoadedModel(checkpoint, verdict, tables, report, options)
