"""Loading: lookup tables straight into pinned host memory, every other tensor to the device on demand."""

from __future__ import annotations

import contextlib
import itertools
import logging
from typing import TYPE_CHECKING, Any

import torch

from ftw.bulk_read import parse_num_threads
from ftw.checkpoint import Checkpoint, open_checkpoint
from ftw.devices import resolve_device
from ftw.errors import ClosedError, NotEligibleError, printable
from ftw.host_tables import HostOptions, load_host_tables, make_embedding
from ftw.memory import MemoryReport, MemoryWatch
from ftw.pin_budget import parse_limit
from ftw.placement import plan_placement, refusal
from ftw.sharded_embedding import all_or_none, resolve_group
from ftw.staging import DummyStage, FileStage
from ftw.table_rows import check_vocab_range
from ftw.verdict import Verdict, judge

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping
    from types import TracebackType

    from torch.distributed import ProcessGroup

    from ftw.config import ModelConfig
    from ftw.embedding import HostEmbedding
    from ftw.sharded_embedding import ShardedEmbedding
    from ftw.staging import Stage

_log = logging.getLogger("ftw")
SHARES: tuple[str | None, ...] = (None, "node")


class LoadedModel:
    """A checkpoint whose lookup tables are loaded and whose other weights stream to the device.

    Use it as a context manager: its close gives the host memory back. Lookups and CUDA graphs that read the tables must
    have ended by then.

    Attributes:
        config: What config.json or a GGUF's metadata say.
        verdict: Which tables may leave the GPU, and why.
        memory: What loading the tables cost.
        tables: The tables in host memory, by the name of their tensor, or of the module where they are cut into shards.
        tensors: What the checkpoint says of each tensor, such as the GGUF type of a packed one.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        verdict: Verdict,
        device: torch.device,
        dtype: torch.dtype | None,
        tables: Mapping[str, HostEmbedding | ShardedEmbedding],
        memory: MemoryReport,
        *,
        is_dummy: bool = False,
        vocab_range: tuple[int, int] | None = None,
    ) -> None:
        self.config: ModelConfig = checkpoint.config
        self.verdict = verdict
        self.memory = memory
        self.device = device
        self.tables = dict(tables)
        self.tensors = checkpoint.tensors
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._is_dummy = is_dummy
        self._vocab_range = vocab_range
        self._device_embedding: HostEmbedding | None = None
        self._device_table: torch.Tensor | None = None
        self._closed = False

    @property
    def embedding(self) -> HostEmbedding | ShardedEmbedding:
        """The token embedding. One that stays on the GPU is loaded there on first use, and `weights` yields that copy.

        There it is whole, on every rank; `vocab_range` holds for its lookups all the same.

        Raises:
            NotEligibleError: The checkpoint has no token embedding whose rows can be looked up.
            ClosedError: The model is closed.
        """
        self._check_open()
        table = self.verdict.token_embedding
        if table.name in self.tables:
            return self.tables[table.name]
        if self._device_embedding is None:
            if table.unreadable:
                raise NotEligibleError(refusal(table, self._checkpoint.source, table.unreadable))
            with self._stage() as stage:
                tensor = stage.load(self._checkpoint, self._checkpoint.tensors[table.name])
            self._device_table = tensor
            start, length = self._vocab_range or (0, tensor.shape[0])
            own: dict[str, Any] = {"placement": "gpu", "vocab_range": self._vocab_range}
            rows = tensor[start : start + length]
            self._device_embedding = make_embedding(self._checkpoint, table, rows, self.device, self._dtype, **own)
        return self._device_embedding

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor but the host tables, on the device, in the order of the bytes on disk.

        Each is a new tensor that belongs to the caller, but for a table that `embedding` has put on the device already:
        that one is shared. Peak memory: the tensors that the caller keeps, and two page-locked buffers of 16 MiB.

        Raises:
            CheckpointError: A file has changed, or holds a dtype that torch has not.
            ClosedError: The model is closed.
        """
        names = (table.tensors for table in self.verdict.tables if table.name in self.tables)
        on_host = frozenset(itertools.chain.from_iterable(names))
        with self._stage() as stage:
            for tensor in self._checkpoint.tensors.values():
                self._check_open()
                if tensor.name in on_host:
                    continue
                if self._device_table is not None and tensor.name == self.verdict.token_embedding.name:
                    yield tensor.name, self._device_table
                else:
                    yield tensor.name, stage.load(self._checkpoint, tensor)

    def close(self) -> None:
        """Give the tables' memory back and end reading; every table is released even if one of them fails."""
        self._closed = True
        self._checkpoint.close()
        with contextlib.ExitStack() as stack:
            for table in self.tables.values():
                stack.callback(table.close)
            self._device_table = None
            if self._device_embedding is not None:
                stack.callback(self._device_embedding.close)

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _stage(self) -> Stage:
        return DummyStage(self.device) if self._is_dummy else FileStage(self.device)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{printable(self._checkpoint.source)}: model: is closed")


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
            with use. What `weights` page-locks for as long as it runs, 32 MiB, comes on top.
        huge_pages: Ask for pages of 2 MiB for large tables; on some kernels their allocation is slow.
        num_threads: How many threads read tables; None for as many as there are processors, but 6 to 8; at most 64.
        tp: Spread host tables by their rows over the ranks of this group, True for the default one: each reads and
            page-locks its own, and a lookup, which all ranks do together, ends in an all_reduce. All ranks load
            together, too, and fail together. A table that stays on the GPU is whole on each.
        vocab_range: `(start, length)`, for an engine with collectives of its own: read only the rows of these token
            ids; every other id gives zeros. Holds for token and per-layer embeddings; n-gram tables stay whole.
        hot_bytes: Keep the rows of the token embedding that are used most on the device, as many as fit into these
            bytes, or a size such as "64MiB"; lookups count, and `embedding.update_hot_rows()` chooses.

    Raises:
        FtwError: With `tp`, another rank could not load.
        NotEligibleError: `embed` is "host" and the token embedding may not leave the GPU.
        SourceNotFoundError: There is no checkpoint of that name.
        CheckpointError: It is broken.
        PinError: The tables don't fit into host memory or the limit, or the driver refused to page-lock one.
        SharedMemoryError: Shared memory holds another table in its place, or has no room.
        DeviceError: torch has no such device.
        ValueError: `embed` or `share` is none of its choices, `dtype` no floating-point type of torch,
            `max_pinned_bytes` no size, `num_threads` no whole number from 1 on, `tp` no group of this process,
            `vocab_range` outside of the table, or one of these two stands beside what it cannot go with.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype is {dtype!r}, a floating-point dtype of torch or None is needed")
    if share not in SHARES:
        raise ValueError(f"share is {share!r}, allowed are 'node' and None")
    group = resolve_group(tp)
    _check_cut(embed, share, has_group=group is not None, has_range=vocab_range is not None)
    limit = parse_limit(max_pinned_bytes)
    threads = parse_num_threads(num_threads)
    options = HostOptions(share == "node", dummy, limit, huge_pages, threads, group, vocab_range, hot_bytes)
    where = resolve_device(device)
    with contextlib.ExitStack() as stack:
        with all_or_none(group, where, str(source)):
            model = _load(source, embed, where, dtype, options, stack)
        stack.pop_all()
    return model


def _load(
    source: str | os.PathLike[str],
    embed: str,
    device: torch.device,
    dtype: torch.dtype | None,
    options: HostOptions,
    stack: contextlib.ExitStack,
) -> LoadedModel:
    """Load a checkpoint; `stack` gives back what that took."""
    checkpoint = stack.enter_context(open_checkpoint(source, headers_only=options.is_dummy))
    verdict = judge(checkpoint)
    if options.vocab_range is not None:
        check_vocab_range(verdict.token_embedding, options.vocab_range)
    placement = plan_placement(verdict, embed, checkpoint.source)
    if embed == "auto" and placement.placement == "gpu":
        _log.warning("%s: the token embedding stays on the GPU: %s", checkpoint.source, placement.reason)
    with MemoryWatch(device) as watch:
        tables = load_host_tables(checkpoint, placement.host_tables, device, dtype, options)
        for table in tables.values():
            stack.callback(table.close)
        is_gpu = device.type == "cuda"
        nbytes = {name: table.pinned_nbytes if is_gpu else table.table.nbytes for name, table in tables.items()}
        report = watch.report(placement.placement, placement.reason, nbytes)
    own: dict[str, Any] = {"is_dummy": options.is_dummy, "vocab_range": options.vocab_range}
    return LoadedModel(checkpoint, verdict, device, dtype, tables, report, **own)


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
