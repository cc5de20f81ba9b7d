"""Loading: lookup tables straight into pinned host memory, every other tensor to the device on demand."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import torch

from ftw.checkpoint import open_checkpoint
from ftw.errors import printable
from ftw.files import parse_num_threads
from ftw.loading.host_tables import HostOptions, load_host_tables
from ftw.loading.loaded_model import LoadedModel
from ftw.loading.ranks import all_or_none, resolve_group
from ftw.loading.table_rows import check_vocab_range
from ftw.pinned import MemoryMonitor, resolve_device
from ftw.sizes import parse_nbytes
from ftw.verdict import judge, plan_placement

if TYPE_CHECKING:
    import os

    from torch.distributed import ProcessGroup

    from ftw.checkpoint import Checkpoint


_log = logging.getLogger("ftw")
SHARES: tuple[str | None, ...] = (None, "node")


def load(
    source: str | os.PathLike[str],
    *,
    embed: str = "gpu",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
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
) -> LoadedModel:
    """Load a checkpoint for serving.

    Args:
        source: A path or a hub id.
        embed: "host" puts the lookup tables into pinned host memory, "auto" does so where it is allowed and says why
            not where it isn't, "gpu" leaves them among the weights.
        device: Where the weights go and lookups run; None for the current GPU, or the CPU on a machine without one.
        dtype: Of the rows that lookups return; None for the table's own, of a packed one bfloat16.
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
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"dtype is {dtype!r}, a floating-point dtype of torch or None is needed")
            if share not in SHARES:
                raise ValueError(f"share is {share!r}, allowed are 'node' and None")
            _check_cut(embed, share, has_group=group is not None, has_range=vocab_range is not None)
            options = HostOptions(
                is_shared=share == "node",
                is_dummy=dummy,
                max_pinned_bytes=parse_nbytes("max_pinned_bytes", max_pinned_bytes),
                huge_pages=huge_pages,
                num_threads=parse_num_threads(num_threads),
                group=group,
                vocab_range=vocab_range,
                hot_bytes=parse_nbytes("hot_bytes", hot_bytes),
                scale=scale,
            )
            asked = "hot_bytes" if options.hot_bytes else "share" if options.is_shared else ""
            if asked and embed == "gpu":
                raise ValueError(f"{asked}: embed='gpu' has no table in host memory, 'host' or 'auto' is needed")
            headers_only = options.is_dummy
            checkpoint = open_checkpoint(source, headers_only=headers_only, decode_df11=decode_df11)
            model = _load(stack.enter_context(checkpoint), embed, where, dtype, options, stack)
        stack.pop_all()
    return model


def _load(
    checkpoint: Checkpoint,
    embed: str,
    device: torch.device,
    dtype: torch.dtype | None,
    options: HostOptions,
    stack: contextlib.ExitStack,
) -> LoadedModel:
    """Load an opened checkpoint; `stack` gives back what that took."""
    verdict = judge(checkpoint)
    for warning in verdict.warnings:
        _log.warning("%s: %s", printable(checkpoint.source), printable(warning))
    if options.vocab_range is not None:
        check_vocab_range(verdict.token_embedding, options.vocab_range)
    placement = plan_placement(verdict, embed, checkpoint.source)
    if embed == "auto" and placement.placement == "gpu":
        _log.warning(
            "%s: the token embedding stays on the GPU: %s", printable(checkpoint.source), printable(placement.reason)
        )
    with MemoryMonitor(device) as watch:
        tables = load_host_tables(checkpoint, placement.host_tables, device, dtype, options)
        for table in tables.values():
            stack.callback(table.close)
        is_gpu = device.type == "cuda"
        nbytes = {name: table.pinned_nbytes if is_gpu else table.table.nbytes for name, table in tables.items()}
        report = watch.report(placement.placement, placement.reason, nbytes)
    return LoadedModel(checkpoint, verdict, device, dtype, tables, report, options)


def _check_cut(embed: str, share: str | None, *, has_group: bool, has_range: bool) -> None:
    """Check what cutting tables by their rows goes with."""
    if has_group and has_range:
        raise ValueError("tp chooses each rank's rows itself, so vocab_range has to be None; give one of the two")
    asked = "tp" if has_group else "vocab_range" if has_range else ""
    if asked and share == "node":
        why = "with share='node' each process of the host looks up all rows itself, and no collective is needed"
        raise ValueError(f"{asked} cuts tables, share='node' does not: {why}; give one of the two")
    if asked and embed == "gpu":
        raise ValueError(f"{asked} cuts tables in host memory, embed='gpu' has none; 'host' or 'auto' is needed")
