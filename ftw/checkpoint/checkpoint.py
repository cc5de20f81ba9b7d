"""Checkpoint: an opened checkpoint of any format, read tensor by tensor into memory that the caller owns."""

from __future__ import annotations

import sys
from bisect import bisect_left
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ftw.checkpoint.config import CONFIG_NAME, ModelConfig, read_model_config
from ftw.checkpoint.df11.tables import find_df11_tables
from ftw.checkpoint.gguf_config import parse_gguf_config
from ftw.checkpoint.layer_folders import find_layer_files
from ftw.checkpoint.source import open_source
from ftw.checkpoint.tensor_names import find_heads, find_token_embeddings
from ftw.checkpoint.token_count import count_tokens
from ftw.errors import CheckpointError, ClosedError, UnknownTensorError, printable
from ftw.files import Part, WeightFile, read_parts
from ftw.host import HostMemory
from ftw.hub import HubPath
from ftw.readers.gguf import rearrange_blocks

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from ftw.checkpoint.df11.tables import Df11Table
    from ftw.files import Roots
    from ftw.readers import DerivedFile, LeftOut, Reader
    from ftw.tensors import Extent, TensorInfo

CHUNK_NBYTES = 16 << 20
_PARALLEL_NBYTES = 2 * CHUNK_NBYTES  # one chunk, cold or warm, a thread alone reads faster (2 cores; 2026-11-30)
_NO_FIGURE = "the KV cache is not counted"
_NOTHING_TO_DECODE = "decode_df11=True: no lookup table is stored as DF11, so none is decoded"


class Checkpoint:
    """An opened checkpoint. Safe to share between threads; it holds no file open between reads.

    Attributes:
        source: What was opened, as the caller named it.
        path: Where that lies: a folder or a file on this machine, or a `HubPath`.
        config: What config.json or a GGUF's metadata say, all None if there are none.
        layer_files: Weight files in folders of their own that hold further layers, relative to `folder`.
        problems: What is broken, of a checkpoint that was opened all the same.
        decoded: The tensors that each plain table in `tensors` is decoded from, by its name; empty unless that was
            asked for.
    """

    def __init__(self, reader: Reader, source: str, *, decode_df11: bool = False) -> None:
        self.source = source
        self.path = reader.place.path
        self.config, self._warnings = _read_config(reader)
        self.problems, excused = _excuse_tied_heads(reader, self.config)
        self.layer_files, beside = find_layer_files(reader.place)
        self._warnings += (*excused, *beside)
        tables = find_df11_tables(source, reader.tensors, self.config) if decode_df11 else []
        if decode_df11 and not tables:
            self._warnings += (_NOTHING_TO_DECODE,)
        self.decoded: Mapping[str, tuple[str, ...]] = {table.tensor.name: table.part_names for table in tables}
        self._df11 = {table.tensor.name: table for table in tables}
        self._tensors = _in_place_of_parts(reader.tensors, tables) if tables else reader.tensors
        self._reader = reader
        self._closed = False
        self._sorted_names: list[str] | None = None

    @property
    def format(self) -> str:
        """Name of the format: "ftw", "gguf" or "safetensors"."""
        return self._reader.format

    @property
    def folder(self) -> Path:
        """Folder that holds config.json and the other metadata files."""
        return self._reader.place.folder

    @property
    def roots(self) -> Roots | None:
        """Where those files may lie, as it was when the checkpoint was opened; None on the hub."""
        return self._reader.place.roots

    @property
    def is_remote(self) -> bool:
        """Whether it lies on the hub, so that reading its tensors costs requests."""
        return isinstance(self.path, HubPath)

    @property
    def files(self) -> tuple[WeightFile, ...]:
        """Files that hold the weights."""
        return self._reader.files

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Tensors by name, in the order of their bytes on disk."""
        return MappingProxyType(self._tensors)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Free key-values of the format."""
        return self._reader.metadata

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """What lies beside the checkpoint and is not part of it, with the reason."""
        return self._reader.left_out

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was taken one way and could have been meant another."""
        return (*self._reader.warnings, *self._warnings)

    @property
    def derived_files(self) -> tuple[DerivedFile, ...]:
        """Files that an FTW made from this checkpoint needs, of what the format keeps among its weights."""
        return self._reader.derived_files()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, padding left out."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End reading; a later read raises `ClosedError`."""
        self._closed = True

    def read_into(self, name: str, buffer: Any, *, offset: int | None = None, num_threads: int | None = None) -> None:
        """Fill a writable buffer with the bytes of a tensor: of the whole one, or from its byte `offset` on.

        The buffer is the caller's: anything with the buffer protocol, or a contiguous torch tensor on the CPU, of any
        dtype. Without `offset` it is as long as the tensor, with one as long as the bytes that are wanted. Bytes go
        from the file straight into it, and from 32 MiB on by `num_threads` parallel reads, around the page cache where
        that is faster; None takes as many as there are processors, but 6 to 8, and 4 MiB of memory for each. Those of a
        big-endian GGUF are then rearranged in the buffer, to what a little-endian one would hold. A decoded table
        takes 8 MiB more while it is read, and one thread. After an error the content of the buffer is undefined.

        Raises:
            UnknownTensorError: There is no such tensor.
            CheckpointError: The buffer is too short or reaches past the tensor's end, or the file has changed.
            ClosedError: The checkpoint is closed.
            OSError: The disk fails; it names the file.
            TypeError: The buffer is none, or a tensor that is not on the CPU or not contiguous.
        """
        self._check_open()
        request = self._request(name, buffer, offset or 0)
        tensor, view, _ = request
        if offset is None and len(view) < tensor.nbytes:
            problem = f"the buffer has {len(view)} bytes, it has {tensor.nbytes}; offset= reads a part"
            raise CheckpointError(self.source, name, problem)
        self._read([request], num_threads)

    def read_many(self, requests: Iterable[tuple[str, Any, int]], *, num_threads: int | None = None) -> None:
        """Fill several buffers, each with the bytes of a tensor from `offset` on, as `read_into` does.

        The threads go from one tensor to the next without a pause. All sizes are checked before the first byte is read.

        Raises:
            UnknownTensorError: There is no such tensor.
            CheckpointError: A buffer reaches past its tensor's end, or a file has changed.
            ClosedError: The checkpoint is closed.
            OSError: The disk fails; it names the file.
        """
        self._check_open()
        self._read([self._request(*request) for request in requests], num_threads, is_bulk=True)

    def names_below(self, path: str) -> Iterator[str]:
        """Yield the names of a module's tensors, sorted, without going through all names for each module."""
        if self._sorted_names is None:
            self._sorted_names = sorted(self.tensors)
        start = f"{path}."
        number = bisect_left(self._sorted_names, start)
        while number < len(self._sorted_names) and self._sorted_names[number].startswith(start):
            yield self._sorted_names[number]
            number += 1

    def extents(self, name: str) -> tuple[Extent, ...]:
        """Return where the bytes of a tensor lie: runs of `files`, in order; of a decoded one, those of its parts."""
        names = self.decoded.get(name, (name,))
        return tuple(extent for part in names for extent in self._reader.extents(self.find_tensor(part)))

    def find_bytes(self, name: str, offset: int, nbytes: int) -> tuple[WeightFile, int] | None:
        """Return which file holds bytes of a tensor, and from where on.

        None if they lie in several places or on the hub, or are not stored as they are read.

        Raises:
            UnknownTensorError: There is no such tensor.
            ClosedError: The checkpoint is closed.
        """
        self._check_open()
        tensor = self.find_tensor(name)
        if name in self._df11 or self._reader.block_order(tensor) is not None:
            return None
        found = list(self._find_stored(tensor, offset, nbytes))
        if len(found) != 1 or found[0][2] != nbytes:
            return None
        file, place, _ = found[0]
        return (file, place) if isinstance(file, WeightFile) else None

    def find_tensor(self, name: str) -> TensorInfo:
        """Return one of `tensors`, or of those that one of them is decoded from, which can be read as they are stored.

        Raises:
            UnknownTensorError: There is no such tensor.
        """
        tensor = self._tensors.get(name) or self._reader.tensors.get(name)
        if tensor is None:
            problem = f"no tensor '{printable(name)}' among {len(self._tensors)}"
            raise UnknownTensorError(f"{printable(self.source)}: tensors: {problem}")
        return tensor

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Return the JSON object in a small file of the checkpoint's folder; None if there is no such file.

        Raises:
            CheckpointError: It is not a JSON object.
        """
        return self._reader.place.read_json(name)

    def count_tokens(self) -> int | None:
        """Return how many tokens the tokenizer beside the weights has at least; None if its files do not tell."""
        return count_tokens(self._reader.place)

    def iter_chunks(self, name: str, chunk_nbytes: int = CHUNK_NBYTES) -> Iterator[memoryview]:
        """Yield the bytes of a tensor in order, each time in the same buffer, which the next step overwrites."""
        nbytes = self.find_tensor(name).nbytes
        memory = HostMemory(min(chunk_nbytes, nbytes))
        for offset in range(0, nbytes, chunk_nbytes):
            view = memory.view()[: nbytes - offset]
            self.read_into(name, view, offset=offset)
            yield view

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{printable(self.source)}: checkpoint: is closed")

    def _request(self, name: str, buffer: Any, offset: int) -> tuple[TensorInfo, memoryview, int]:
        """Check what is asked for against what the tensor has."""
        tensor, view = self.find_tensor(name), _bytes_of(buffer)
        if offset < 0 or offset + len(view) > tensor.nbytes:
            problem = f"bytes {offset} to {offset + len(view)} were asked for, it has {tensor.nbytes}"
            raise CheckpointError(self.source, name, problem)
        return tensor, view, offset

    def _read(
        self, wanted: list[tuple[TensorInfo, memoryview, int]], num_threads: int | None, *, is_bulk: bool = False
    ) -> None:
        """Fill views with the bytes of tensors from an offset on, in little-endian order."""
        stored = [request for request in wanted if request[0].name not in self._df11]
        parts = [part for request in stored for part in self._stored_parts(*request)]
        if is_bulk or sum(len(part.view) for part in parts) >= _PARALLEL_NBYTES:
            read_parts(parts, num_threads=num_threads)
        else:
            for part in parts:
                part.file.read_into(part.offset, part.view)
        for tensor, view, offset in stored:
            order = self._reader.block_order(tensor)
            if order is not None:
                rearrange_blocks(view, offset, order, partial(self._read_raw, tensor))
        for tensor, view, offset in wanted:
            if tensor.name in self._df11:
                self._df11[tensor.name].read_into(view, offset, self._read_stored)

    def _read_stored(self, name: str, view: memoryview, offset: int) -> None:
        self._read([(self._reader.tensors[name], view, offset)], num_threads=1)

    def _read_raw(self, tensor: TensorInfo, offset: int, view: memoryview) -> None:
        for part in self._stored_parts(tensor, view, offset):
            part.file.read_into(part.offset, part.view)

    def _stored_parts(self, tensor: TensorInfo, view: memoryview, offset: int) -> Iterator[Part]:
        """Yield where the bytes of a tensor from `offset` on are stored, as many as the view takes."""
        done = 0
        for file, place, nbytes in self._find_stored(tensor, offset, len(view)):
            yield Part(file, place, view[done : done + nbytes])
            done += nbytes

    def _find_stored(self, tensor: TensorInfo, offset: int, nbytes: int) -> Iterator[tuple[WeightFile, int, int]]:
        """Yield where bytes of a tensor are stored, in order: each file, the place in it, and how many lie there."""
        start = 0
        for extent in self._reader.extents(tensor):
            if start >= offset + nbytes:
                break
            end = start + extent.nbytes
            low, high = max(start, offset), min(end, offset + nbytes)
            if low < high:
                yield self._reader.files[extent.file], extent.offset + low - start, high - low
            start = end


def _in_place_of_parts(tensors: Mapping[str, TensorInfo], tables: list[Df11Table]) -> Mapping[str, TensorInfo]:
    """Return tensors with each decoded table where the first of its parts was."""
    plain = {name: table.tensor for table in tables for name in table.part_names}
    return {tensor.name: tensor for tensor in (plain.get(name, stored) for name, stored in tensors.items())}


def _read_config(reader: Reader) -> tuple[ModelConfig, tuple[str, ...]]:
    """Return what the metadata of a GGUF say, or config.json, and warnings.

    A config.json that is a link out of the folder is not read, as a conversion does not copy it.
    """
    metadata = reader.gguf_metadata()
    if metadata is not None:
        config = parse_gguf_config(*metadata)
        return config, tuple(f"metadata: {problem}; {_NO_FIGURE}" for problem in config.contradictions)
    if reader.place.leads_out(CONFIG_NAME):
        return ModelConfig(is_unread=True), (f"{CONFIG_NAME} is a link that leads out of the folder, and is not read",)
    config = read_model_config(reader.place)
    return config, tuple(f"{CONFIG_NAME}: {problem}; {_NO_FIGURE}" for problem in config.contradictions)


def _excuse_tied_heads(reader: Reader, config: ModelConfig) -> tuple[tuple[CheckpointError, ...], tuple[str, ...]]:
    """Return what is broken, and warnings of LM heads that an index names and no file holds, if they can be the table.

    A tool that saves a tied model may list the head, and store the table alone.
    """
    if not reader.problems or False in (config.tie_flag, config.text_tie_flag):
        return reader.problems, ()
    names = [problem.subject for problem in reader.problems]
    heads = {name for head in find_heads([*names, *reader.tensors]) for name in head.tensors.values()} & {*names}
    if not heads or not find_token_embeddings(reader.tensors):
        return reader.problems, ()
    excused = tuple(
        f"{printable(name)} is named by the index, and no file holds it, as where it is tied to the table"
        for name in sorted(heads)
    )
    return tuple(problem for problem in reader.problems if problem.subject not in heads), excused


def _bytes_of(buffer: Any) -> memoryview:
    torch = sys.modules.get("torch")  # who has a tensor has imported it
    view = _bytes_of_tensor(buffer, torch) if torch and isinstance(buffer, torch.Tensor) else memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")  # shapes with a zero in them cannot be cast


def _bytes_of_tensor(tensor: Any, torch: Any) -> memoryview:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        found = f"a tensor on {tensor.device}, {'' if tensor.is_contiguous() else 'not '}contiguous"
        raise TypeError(f"buffer: is {found}; a contiguous one on the CPU is needed")
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def open_checkpoint(
    source: str | os.PathLike[str],
    *,
    headers_only: bool = False,
    decode_df11: bool = False,
    follow_links: bool = False,
) -> Checkpoint:
    """Open a checkpoint: a folder, a weight file, an index file, or a hub id, as "org/name@revision/folder/file".

    Reads headers alone. Use it as a context manager.

    Args:
        source: What to open.
        headers_only: Fetch nothing of a hub id: its headers are read where they lie, and so is every tensor that is
            asked for. Otherwise all that a conversion needs is fetched into huggingface_hub's cache.
        decode_df11: Show lookup tables that are stored as DF11, token embeddings and per-layer ones, as the plain bf16
            tables that they decode to, and decode what is read of them. Other modules stay as they are stored.
        follow_links: Follow links that lead out of the checkpoint's folder. Do so only if you know who made them: they
            make any file that you may read a part of the checkpoint.

    Raises:
        SourceNotFoundError: There is nothing of that name, or nothing that ftw reads in it.
        CheckpointError: A header, an index or config.json is broken, or a table cannot be decoded: a tensor of it is
            missing or has a wrong size, or config.json does not say its shape.
        ConnectionError: The hub stopped answering.
    """
    reader = open_source(source, headers_only=headers_only, follow_links=follow_links)
    checkpoint = Checkpoint(reader, str(source), decode_df11=decode_df11)
    for problem in checkpoint.problems:
        raise problem
    return checkpoint


def open_damaged(source: str | os.PathLike[str], *, follow_links: bool = False) -> Checkpoint:
    """Open a checkpoint as `open_checkpoint` does, but for what its `problems` say.

    Reading what broken shards lack raises an error.
    """
    return Checkpoint(open_source(source, headers_only=False, follow_links=follow_links), str(source))
