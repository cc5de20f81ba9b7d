"""Loading: lookup tables straight into pinned host memory, every other tensor to the device on demand."""

from __future__ import annotations

import contextlib
import itertools
import logging
from typing import TYPE_CHECKING

import torch

from ftw.checkpoint import Checkpoint, open_checkpoint
from ftw.devices import resolve_device
from ftw.errors import ClosedError, NotEligibleError, printable
from ftw.host_tables import HostOptions, load_host_tables, make_embedding
from ftw.memory import MemoryReport, MemoryWatch
from ftw.pin_budget import parse_limit
from ftw.placement import plan_placement, refusal
from ftw.staging import DummyStage, FileStage
from ftw.verdict import Verdict, judge

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping
    from types import TracebackType

    from ftw.config import ModelConfig
    from ftw.embedding import HostEmbedding
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
        tables: Mapping[str, HostEmbedding],
        memory: MemoryReport,
        *,
        is_dummy: bool = False,
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
        self._device_embedding: HostEmbedding | None = None
        self._device_table: torch.Tensor | None = None
        self._closed = False

    @property
    def embedding(self) -> HostEmbedding:
        """The token embedding. One that stays on the GPU is loaded there on first use, and `weights` yields that copy.

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
            self._device_embedding = make_embedding(table, tensor, self.device, self._dtype, placement="gpu")
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
        max_pinned_bytes: What this process may page-lock in all, as bytes or as a size such as "8GiB". None for what
            the host has available; a limit of yours takes the place of that, as some hosts' memory grows with use.
        huge_pages: Ask for pages of 2 MiB for large tables; on some kernels their allocation is slow.
        num_threads: How many threads read tables; None for as many as there are processors, 6 to 8.

    Raises:
        NotEligibleError: `embed` is "host" and the token embedding may not leave the GPU.
        SourceNotFoundError: There is no checkpoint of that name.
        CheckpointError: It is broken.
        PinError: The tables don't fit into host memory or the limit, or the driver refused to page-lock one.
        SharedMemoryError: Shared memory holds another table in its place, or has no room.
        DeviceError: torch has no such device.
        ValueError: `embed` or `share` is none of its choices, `dtype` no floating-point type of torch, or
            `max_pinned_bytes` no size.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype is {dtype!r}, a floating-point dtype of torch or None is needed")
    if share not in SHARES:
        raise ValueError(f"share is {share!r}, allowed are 'node' and None")
    options = HostOptions(share == "node", dummy, parse_limit(max_pinned_bytes), huge_pages, num_threads)
    where = resolve_device(device)
    with contextlib.ExitStack() as stack:
        checkpoint = stack.enter_context(open_checkpoint(source, headers_only=dummy))
        verdict = judge(checkpoint)
        placement = plan_placement(verdict, embed, checkpoint.source)
        if embed == "auto" and placement.placement == "gpu":
            _log.warning("%s: the token embedding stays on the GPU: %s", checkpoint.source, placement.reason)
        with MemoryWatch(where) as watch:
            tables = load_host_tables(checkpoint, placement.host_tables, where, dtype, options)
            for table in tables.values():
                stack.callback(table.close)
            is_gpu = where.type == "cuda"
            nbytes = {name: table.pinned_nbytes if is_gpu else table.table.nbytes for name, table in tables.items()}
            report = watch.report(placement.placement, placement.reason, nbytes)
        model = LoadedModel(checkpoint, verdict, where, dtype, tables, report, is_dummy=dummy)
        stack.pop_all()
    return model
