"""LoadedModel: a checkpoint whose lookup tables are loaded and whose other weights stream to the device."""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import TYPE_CHECKING, NoReturn

import torch

from ftw.errors import ClosedError, NotEligibleError, printable
from ftw.loading.device_copy import DeviceCopy
from ftw.loading.options import LoadOptions, row_options
from ftw.lookup import make_embedding
from ftw.sizes import format_size
from ftw.verdict import refusal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ftw.checkpoint import Checkpoint, ModelConfig
    from ftw.lookup import HostEmbedding
    from ftw.pinned import MemoryReport
    from ftw.verdict import TableVerdict, Verdict


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
        tables: Mapping[str, HostEmbedding],
        memory: MemoryReport,
        options: LoadOptions,
    ) -> None:
        self.config: ModelConfig = checkpoint.config
        self.verdict = verdict
        self.memory = memory
        self.device = options.device
        self.tables = dict(tables)
        self.tensors = checkpoint.tensors
        self._checkpoint = checkpoint
        self._options = options
        self._device_embedding: HostEmbedding | None = None
        self._device_table: torch.Tensor | None = None
        self._closed = False
        self._lock = threading.Lock()  # while the table is put on the device

    @property
    def embedding(self) -> HostEmbedding:
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
        with self._lock:
            if self._device_embedding is None:
                self._device_embedding = self._load_on_device(table)
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
        with DeviceCopy(self.device, is_dummy=self._options.is_dummy) as copy:
            for tensor in self._checkpoint.tensors.values():
                self._check_open()
                if tensor.name in on_host:
                    continue
                if self._device_table is not None and tensor.name == self.verdict.token_embedding.name:
                    yield tensor.name, self._device_table
                else:
                    yield tensor.name, copy.load(self._checkpoint, tensor)

    def __repr__(self) -> str:
        """Return a line: the checkpoint, where its token embedding is, and what the tables take."""
        tables = ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in self.memory.pinned_bytes.items())
        where = f"token embedding: {self.memory.placement}, tables in host memory: {tables or 'none'}"
        state = ", closed" if self._closed else ""
        return f"LoadedModel({self._checkpoint.source!r} on {self.device}; {where}{state})"

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

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load_on_device(self, table: TableVerdict) -> HostEmbedding:
        if table.unreadable:
            raise NotEligibleError(refusal(table, self._checkpoint.source, table.unreadable))
        with DeviceCopy(self.device, is_dummy=self._options.is_dummy) as copy:
            tensor = copy.load(self._checkpoint, self._checkpoint.tensors[table.name])
        self._device_table = tensor
        start, length = self._options.vocab_range or (0, tensor.shape[0])
        own = row_options(table, self.config, self._options, self._options.vocab_range)._replace(hot_bytes=None)
        return make_embedding(tensor[start : start + length][: table.rows], table.name, self.device, own)

    def __reduce__(self) -> NoReturn:
        what = f"{printable(self._checkpoint.source)}: model: owns memory of this process and is not copied or pickled"
        raise TypeError(f"{what}; share it between threads, or copy its embedding, which shares the table")

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{printable(self._checkpoint.source)}: model: is closed")
