"""GgufReader: a GGUF model, in one file or in shards.

The first shard holds the metadata; the others hold only which shard they are. Each has a header of its own, and data
that begins at the next multiple of its alignment. Tensors may lie there in any order and leave holes, but neither
overlap nor reach past the end of the file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ftw.errors import CheckpointError, printable
from ftw.files import short_repr
from ftw.readers.base import Found
from ftw.readers.gguf.byte_order import read_block_orders
from ftw.readers.gguf.files import choose_files, is_shard_name
from ftw.readers.gguf.header import MAGIC, MAX_TENSORS, read_gguf_header
from ftw.readers.gguf.metadata import ALIGNMENT_KEY, ARCHITECTURE_KEY, ValueType
from ftw.readers.gguf.metadata_copy import metadata_copy
from ftw.readers.tensor_budget import TensorBudget
from ftw.sizes import align_up
from ftw.tensors import Extent, TensorInfo

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ftw.files import WeightFile
    from ftw.hub import Place
    from ftw.readers.base import DerivedFile, FileHead
    from ftw.readers.gguf.header import GgufHeader, RawTensor

DEFAULT_ALIGNMENT = 32
EMBEDDING = "token_embd.weight"
_SPLIT_NO = "split.no"
_SPLIT_COUNT = "split.count"
_SPLIT_TENSORS = "split.tensors.count"
_SPLIT_KEYS = (_SPLIT_NO, _SPLIT_COUNT, _SPLIT_TENSORS)


class GgufReader:
    """A GGUF model; see `ftw.readers.base.Reader`.

    Attributes:
        metadata: The key-values of the first shard.
        header_file: The first shard.
        metadata_end: Where its key-values end.
        byte_order: "<" or ">", of all shards.
    """

    format: ClassVar[str] = "gguf"

    def __init__(self, place: Place, found: Found) -> None:
        self.place, self.left_out = place, found.left_out
        self.files = place.open_files(found.files, is_named=len(found.files) == 1)
        headers = _read_headers(self.files)
        self.header_file = self.files[0]
        self.metadata: dict[str, Any] = headers[0].metadata
        self.metadata_end = headers[0].metadata_end
        self.byte_order = headers[0].byte_order
        _check_splits(self.files, headers)
        if ARCHITECTURE_KEY not in self.metadata:
            problem = "is missing, the name of an architecture is needed"
            raise CheckpointError(self.header_file.path, ARCHITECTURE_KEY, problem)
        self._file_of_shard = {name: number for number, name in enumerate(found.files)}
        self.tensors: dict[str, TensorInfo] = {}
        for name, file, header in zip(found.files, self.files, headers, strict=True):
            alignment = _choose_alignment(header, headers[0], file)
            for tensor in _place_tensors(header, alignment, file, name):
                self._add(tensor, file)
        self._check_embedding()
        self._block_orders: dict[str, tuple[int, ...] | None] = {}
        self.warnings = found.warnings
        self.problems: tuple[CheckpointError, ...] = ()
        if self.byte_order == ">":
            by_name = dict(zip(found.files, self.files, strict=True))
            self._block_orders, warning = read_block_orders(self.tensors.values(), by_name)
            self.warnings += (warning,) if warning else ()

    @staticmethod
    def find(place: Place) -> Found | None:
        """Return the one model of a folder, or the file that the user named, with all shards of its set.

        Raises:
            CheckpointError: A shard is missing, or a folder holds several models.
        """
        chosen = choose_files(place)
        if chosen is None:
            return None
        names, left_out = chosen
        return Found(GgufReader.format, GgufReader, tuple(names), is_listed=True, left_out=left_out)

    @staticmethod
    def recognise(file: FileHead) -> Found | None:
        """Return a file by its magic."""
        is_one = file.first.startswith(MAGIC)
        return Found(GgufReader.format, GgufReader, (file.name,), is_listed=True) if is_one else None

    def extents(self, tensor: TensorInfo) -> tuple[Extent, ...]:
        """Return where the bytes of one of `tensors` lie: always one run."""
        return (Extent(self._file_of_shard[tensor.shard], tensor.offset, tensor.nbytes),)

    def block_order(self, tensor: TensorInfo) -> tuple[int, ...] | None:
        """Return how the bytes of a block of a big-endian tensor have to be rearranged."""
        return self._block_orders.get(tensor.ggml_type or tensor.dtype)

    def gguf_metadata(self) -> tuple[Mapping[str, Any], Path]:
        """Return the key-values, and the first shard's path."""
        return self.metadata, self.header_file.path

    def derived_files(self) -> tuple[DerivedFile, ...]:
        """Return the copy of the metadata: a GGUF without tensors."""
        return (metadata_copy(self),)

    def _add(self, tensor: TensorInfo, file: WeightFile) -> None:
        if tensor.name in self.tensors:
            other = printable(self.tensors[tensor.name].shard)
            raise CheckpointError(file.path, tensor.name, f"lies in {other} too, names must be unique")
        self.tensors[tensor.name] = tensor

    def _check_embedding(self) -> None:
        """Check the width of the embedding against what the metadata says."""
        architecture = self.metadata[ARCHITECTURE_KEY]
        key = f"{architecture}.embedding_length"
        width = self.metadata.get(key)
        table = self.tensors.get(EMBEDDING)
        shape = table.logical_shape or table.shape if table else ()
        if table is None or type(width) is not int or len(shape) != 2:
            return
        if shape[1] not in (width, self.metadata.get(f"{architecture}.features_length")):
            problem = f"has {shape[1]} columns, but {short_repr(key)} is {width}"
            raise CheckpointError(self.place.folder / table.shard, EMBEDDING, problem)


def read_gguf_metadata(file: WeightFile) -> dict[str, Any]:
    """Read the key-values of one file; its header is checked whole, where its tensors lie is not.

    Raises:
        CheckpointError: The header breaks the format in any way.
    """
    return read_gguf_header(file, TensorBudget()).metadata


def _read_headers(files: tuple[WeightFile, ...]) -> list[GgufHeader]:
    """Return the headers of all shards; for those after the first, keep only the split.* keys."""
    headers: list[GgufHeader] = []
    num_tensors, budget = 0, TensorBudget()
    for file in files:
        header = read_gguf_header(file, budget)
        num_tensors += len(header.tensors)
        if num_tensors > MAX_TENSORS:
            problem = f"the number of tensors is {num_tensors} up to this shard, at most {MAX_TENSORS} are allowed"
            raise CheckpointError(file.path, "header", problem)
        if headers:
            metadata = {key: header.metadata[key] for key in _SPLIT_KEYS if key in header.metadata}
            types = {key: header.value_types[key] for key in metadata}
            header = header._replace(metadata=metadata, value_types=types)
        headers.append(header)
    return headers


def _check_splits(files: tuple[WeightFile, ...], headers: list[GgufHeader]) -> None:
    """Check what each shard says of its place in the set."""
    first = headers[0]
    if len(files) == 1:
        count = _split_value(files[0], first, _SPLIT_COUNT, ValueType.UINT16) or 0
        if count > 1 and not is_shard_name(files[0].path.name):
            problem = f"is {count}, but the file's name is not that of a shard, NAME-00001-of-{count:05}.gguf"
            raise CheckpointError(files[0].path, _SPLIT_COUNT, problem)
        return
    num_tensors = sum(len(header.tensors) for header in headers)
    for number, (file, header) in enumerate(zip(files, headers, strict=True)):
        wanted = (
            (_SPLIT_NO, ValueType.UINT16, number),
            (_SPLIT_COUNT, ValueType.UINT16, len(files)),
            (_SPLIT_TENSORS, ValueType.INT32, num_tensors),
        )
        for key, kind, value in wanted:
            found = _split_value(file, header, key, kind)
            if found != value:
                raise CheckpointError(file.path, key, f"is {'missing' if found is None else found}, {value} is needed")
        if header.byte_order != first.byte_order:
            raise CheckpointError(file.path, "header", "has another byte order than the first shard")


def _split_value(file: WeightFile, header: GgufHeader, key: str, kind: ValueType) -> int | None:
    found = header.value_types.get(key)
    if found not in (None, kind):
        raise CheckpointError(file.path, key, f"is a {found.name}, a {kind.name} is needed")
    value: int | None = header.metadata.get(key)
    return value


def _choose_alignment(header: GgufHeader, first: GgufHeader, file: WeightFile) -> int:
    """Return the alignment of one shard.

    One without a key of its own was written with the first shard's by the gguf package, with the default by llama.cpp:
    the right one is that under which the data fill the file.
    """
    if header.alignment:
        return header.alignment
    data_nbytes = max((tensor.offset + tensor.nbytes for tensor in header.tensors), default=0)
    for alignment in (first.alignment or DEFAULT_ALIGNMENT, DEFAULT_ALIGNMENT):
        end = align_up(header.header_end, alignment) + data_nbytes
        if file.nbytes in (end, align_up(end, alignment)):
            return alignment
    if data_nbytes and (first.alignment or DEFAULT_ALIGNMENT) != DEFAULT_ALIGNMENT:
        found = f"is missing, and under neither {first.alignment} nor {DEFAULT_ALIGNMENT} the data fill the file"
        raise CheckpointError(file.path, ALIGNMENT_KEY, found)
    return DEFAULT_ALIGNMENT


def _place_tensors(header: GgufHeader, alignment: int, file: WeightFile, shard: str) -> list[TensorInfo]:
    """Return the tensors of one shard in the order of their bytes, after checking where they lie."""
    data_start = align_up(header.header_end, alignment)
    position = data_start
    tensors: list[TensorInfo] = []
    for raw in sorted(header.tensors, key=lambda raw: (raw.offset, raw.nbytes)):
        if raw.offset % alignment:
            problem = f"begins at byte {raw.offset} of the data, a multiple of {alignment} is needed"
            raise CheckpointError(file.path, raw.name, problem)
        start = data_start + raw.offset
        _check_end(raw, start + raw.nbytes, alignment, file)
        if raw.nbytes:
            if start < position:
                problem = f"overlaps the tensor before it, which ends at {position}"
                raise CheckpointError(file.path, raw.name, f"begins at byte {start} of the file and {problem}")
            position = start + raw.nbytes
        tensors.append(_tensor_info(raw, start, shard))
    return tensors


def _check_end(raw: RawTensor, end: int, alignment: int, file: WeightFile) -> None:
    """Check that a tensor ends in its file; an empty one may end where the file would if it were padded."""
    if end > (file.nbytes if raw.nbytes else align_up(file.nbytes, alignment)):
        raise CheckpointError(file.path, raw.name, f"ends at byte {end}, but the file has only {file.nbytes}")


def _tensor_info(raw: RawTensor, offset: int, shard: str) -> TensorInfo:
    known = raw.ggml_type
    shape = raw.sizes[::-1]
    if known.is_plain:
        return TensorInfo(raw.name, known.name, shape, offset, raw.nbytes, shard)
    packed = (*shape[:-1], known.row_nbytes(shape[-1]))
    return TensorInfo(raw.name, "U8", packed, offset, raw.nbytes, shard, ggml_type=known.name, logical_shape=shape)
