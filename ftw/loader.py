"""Loading: lookup tables straight into pinned host memory, every other tensor to the device on demand.

A host table goes from its file into the memory it stays in, and is page-locked there; none of it passes through the
device. Other tensors stream through two page-locked buffers of 16 MiB, one being read while the other is copied.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from typing import TYPE_CHECKING, Any

import torch

from ftw.checkpoint import CHUNK_NBYTES, Checkpoint, open_checkpoint
from ftw.dtypes import DTYPES
from ftw.embedding import HostEmbedding
from ftw.errors import CheckpointError, ClosedError, DeviceError, NotEligibleError, printable
from ftw.ggml_types import PACKED_TYPES
from ftw.host_memory import HUGE_PAGE_NBYTES, HostMemory
from ftw.kernels.packed_lookup import prepare
from ftw.memory import MemoryReport, make_report, snapshot
from ftw.pinned import PinnedBuffer
from ftw.placement import plan_placement, refusal
from ftw.verdict import Verdict, judge

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping
    from types import TracebackType

    from ftw.config import ModelConfig
    from ftw.tensors import TensorInfo
    from ftw.verdict import TableVerdict

_log = logging.getLogger("ftw")
_NUM_STAGING_BUFFERS = 2


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
    ) -> None:
        self.config: ModelConfig = checkpoint.config
        self.verdict = verdict
        self.memory = memory
        self.device = device
        self.tables = dict(tables)
        self.tensors = checkpoint.tensors
        self._checkpoint = checkpoint
        self._dtype = dtype
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
            with _Staging(self.device) as staging:
                tensor = staging.load(self._checkpoint, self._checkpoint.tensors[table.name])
            self._device_table = tensor
            self._device_embedding = _make_embedding(table, tensor, self.device, self._dtype, placement="gpu")
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
        with _Staging(self.device) as staging:
            for tensor in self._checkpoint.tensors.values():
                self._check_open()
                if tensor.name in on_host:
                    continue
                if self._device_table is not None and tensor.name == self.verdict.token_embedding.name:
                    yield tensor.name, self._device_table
                else:
                    yield tensor.name, staging.load(self._checkpoint, tensor)

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

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{printable(self._checkpoint.source)}: model: is closed")


def load(
    source: str | os.PathLike[str],
    *,
    embed: str = "gpu",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> LoadedModel:
    """Load a checkpoint for serving.

    Args:
        source: A path or a hub id.
        embed: "host" puts the lookup tables into pinned host memory, "auto" does so where it is allowed and says why
            not where it isn't, "gpu" leaves them among the weights.
        device: Where the weights go and lookups run; None for the current GPU, or the CPU on a machine without one.
        dtype: Of the rows that lookups return; None for the table's own, of a packed one bfloat16.

    Raises:
        NotEligibleError: `embed` is "host" and the token embedding may not leave the GPU.
        SourceNotFoundError: There is no checkpoint of that name.
        CheckpointError: It is broken.
        PinError: The driver refused to page-lock a table.
        DeviceError: torch has no such device.
        ValueError: `embed` is none of the three, or `dtype` is no floating-point type of torch.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype is {dtype!r}, a floating-point dtype of torch or None is needed")
    where = _resolve_device(device)
    with contextlib.ExitStack() as stack:
        checkpoint = stack.enter_context(open_checkpoint(source))
        verdict = judge(checkpoint)
        placement = plan_placement(verdict, embed, checkpoint.source)
        if embed == "auto" and placement.placement == "gpu":
            _log.warning("%s: the token embedding stays on the GPU: %s", checkpoint.source, placement.reason)
        before = snapshot(where)
        tables: dict[str, HostEmbedding] = {}
        for table in placement.host_tables:
            tables[table.name] = _load_host_table(checkpoint, table, where, dtype)
            stack.callback(tables[table.name].close)
        is_gpu = where.type == "cuda"
        pinned = {name: table.pinned_nbytes if is_gpu else table.table.nbytes for name, table in tables.items()}
        model = LoadedModel(checkpoint, verdict, where, dtype, tables, make_report(where, placement, pinned, before))
        stack.pop_all()
    return model


def _resolve_device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"{device}: device: {str(error).splitlines()[0]}") from error
    if where.type == "cpu":
        return where
    count = torch.cuda.device_count() if where.type == "cuda" else 0
    if not count or (where.index or 0) >= count:
        found = f"cuda:0 to cuda:{count - 1}" if count else "no CUDA or ROCm device"
        raise DeviceError(f"{where}: device: torch finds {found}; 'cpu' works without one")
    return torch.device("cuda", torch.cuda.current_device() if where.index is None else where.index)


def _load_host_table(
    checkpoint: Checkpoint, table: TableVerdict, device: torch.device, dtype: torch.dtype | None
) -> HostEmbedding:
    """Read a table into the memory where it stays, then page-lock it."""
    tensors = [checkpoint.tensors[name] for name in table.tensors]
    buffer = PinnedBuffer(sum(tensor.nbytes for tensor in tensors))
    with contextlib.ExitStack() as stack:
        stack.callback(buffer.close)
        offset = 0
        for tensor in tensors:
            checkpoint.read_into(tensor.name, buffer.view()[offset : offset + tensor.nbytes])
            offset += tensor.nbytes
        buffer.pin(device)
        num_rows = sum(tensor.shape[0] for tensor in tensors)
        whole = tensors[0]._replace(shape=(num_rows, *tensors[0].shape[1:]))  # of its shards, one after another
        rows = _as_tensor(checkpoint, whole, buffer.view())
        embedding = _make_embedding(table, rows, device, dtype, buffer=buffer)
        stack.pop_all()  # all went well: the embedding closes it from here on
    return embedding


def _make_embedding(
    table: TableVerdict, rows: torch.Tensor, device: torch.device, dtype: torch.dtype | None, **options: Any
) -> HostEmbedding:
    """Return a table as a module, without padding rows at its end, ready to be captured in a CUDA graph."""
    ggml_type = table.dtype if table.dtype in PACKED_TYPES else None
    if ggml_type is not None:
        prepare(ggml_type, device)
    return HostEmbedding(rows[: table.rows], name=table.name, dtype=dtype, ggml_type=ggml_type, **options)


def _read_cpu_tensor(checkpoint: Checkpoint, tensor: TensorInfo) -> torch.Tensor:
    """Return a new tensor in host memory, a large one in huge pages: their first touch takes a fifth of the time."""
    is_large = tensor.nbytes >= HUGE_PAGE_NBYTES
    view = HostMemory(tensor.nbytes).view() if is_large else memoryview(bytearray(tensor.nbytes))
    checkpoint.read_into(tensor.name, view)
    return _as_tensor(checkpoint, tensor, view)


def _as_tensor(checkpoint: Checkpoint, tensor: TensorInfo, view: memoryview) -> torch.Tensor:
    """Return a tensor over the bytes of `view`, which it keeps alive."""
    dtype = _torch_dtype(checkpoint, tensor)
    if not len(view):
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(view, dtype=torch.uint8).view(dtype).reshape(tensor.shape)


def _torch_dtype(checkpoint: Checkpoint, tensor: TensorInfo) -> torch.dtype:
    name = DTYPES[tensor.dtype].torch_name
    dtype = getattr(torch, name, None) if name else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            checkpoint.source, tensor.name, f"dtype is {tensor.dtype}, which this torch does not have"
        )
    return dtype


class _Staging:
    """Two page-locked buffers that tensors stream through on their way to a device; none for a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[PinnedBuffer] = []
        self._copies: list[torch.cuda.Event | None] = [None] * _NUM_STAGING_BUFFERS
        self._next = 0

    def __enter__(self) -> _Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as stack:
            for buffer in self._buffers:
                stack.callback(buffer.close)

    def load(self, checkpoint: Checkpoint, tensor: TensorInfo) -> torch.Tensor:
        """Return a new tensor on the device, complete for work that is queued on its current stream."""
        if self._device.type == "cpu":
            return _read_cpu_tensor(checkpoint, tensor)
        target = torch.empty(tensor.shape, dtype=_torch_dtype(checkpoint, tensor), device=self._device)
        if not tensor.nbytes:
            return target
        flat = target.reshape(-1).view(torch.uint8)
        for offset in range(0, tensor.nbytes, CHUNK_NBYTES):
            nbytes = min(CHUNK_NBYTES, tensor.nbytes - offset)
            number = self._next_buffer()
            view = self._buffers[number].view()[:nbytes]
            checkpoint.read_into(tensor.name, view, offset=offset)
            staged = torch.frombuffer(view, dtype=torch.uint8)
            flat[offset : offset + nbytes].copy_(staged, non_blocking=True)
            event = self._copies[number] = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
        return target

    def _next_buffer(self) -> int:
        """Return the number of a buffer that no copy reads any more."""
        number = self._next
        self._next = (number + 1) % _NUM_STAGING_BUFFERS
        if number == len(self._buffers):
            buffer = PinnedBuffer(CHUNK_NBYTES)
            self._buffers.append(buffer)
            buffer.pin(self._device)
        copy = self._copies[number]
        if copy is not None:
            copy.synchronize()
        return number
