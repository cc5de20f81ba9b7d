"""FtwReader: an FTW folder.

    freetoken_weight.json      the index: format, version, align, shard_limit, total_bytes, tensors[], shards[]
    freetoken-00000.ftw …      one logical region of bytes, cut into shards that follow each other without a gap
    side files                 safetensors files that the index names under "side_files", found by their own headers

Every tensor begins at a multiple of 4096 in the region; zeros fill it up to the next multiple. A tensor larger than a
shard continues in the next one. Unknown keys are kept in `metadata` and otherwise ignored.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import xxhash

from ftw.errors import CheckpointError, printable
from ftw.files import is_name_inside, short_repr
from ftw.readers.base import DerivedFile, Found
from ftw.readers.ftw_format import (
    ALIGNMENT,
    FORMAT_NAME,
    GGUF_METADATA_NAME,
    INDEX_NAME,
    check_gguf_metadata_size,
    read_ftw_key,
)
from ftw.readers.ftw_index import read_ftw_index
from ftw.readers.gguf.reader import read_gguf_metadata
from ftw.readers.safetensors.header import read_safetensors_header
from ftw.readers.tensor_budget import TensorBudget
from ftw.sizes import align_up
from ftw.tensors import Extent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from ftw.files import WeightFile
    from ftw.hub import Place
    from ftw.readers.base import FileHead, LeftOut
    from ftw.tensors import TensorInfo

_CHUNK_NBYTES = 1 << 20
_FORMAT = re.compile(rb'"format"\s*:\s*"' + FORMAT_NAME.encode() + b'"')


class FtwReader:
    """An FTW checkpoint; see `ftw.readers.base.Reader`. `metadata` is the index less its two lists."""

    format: ClassVar[str] = "ftw"

    def __init__(self, place: Place, found: Found, *, index_name: str = INDEX_NAME) -> None:
        self.place = place
        self._index_path = place.folder / index_name
        self._budget = TensorBudget()
        real = place.locate(index_name)
        index, tensors, self._shards = read_ftw_index(self._index_path, self._budget, real)
        self._problems: list[CheckpointError] = []
        self.files = self._open_shards(index)
        self.problems = tuple(self._problems)
        self._shard_offsets = [shard.global_off for shard in self._shards]
        self.tensors = self._place_tensors(tensors, index["total_bytes"])
        self._file_of_side_file: dict[str, int] = {}
        self._read_side_files(index.get("side_files"))
        self.metadata: dict[str, Any] = index
        self._gguf_copy = self._open_gguf_copy()
        self.left_out: tuple[LeftOut, ...] = found.left_out
        self.warnings = found.warnings

    @staticmethod
    def find(place: Place) -> Found | None:
        """Return the FTW of a folder with an index, or of an index that the user named; it says which are its files."""
        is_ftw = (place.folder / INDEX_NAME).is_file() if place.is_folder else place.path.name == INDEX_NAME
        return Found(FtwReader.format, FtwReader) if is_ftw else None

    @staticmethod
    def recognise(file: FileHead) -> Found | None:
        """Return the FTW of an index of another name, by its key "format"."""
        is_index = _FORMAT.search(file.first) and file.first.lstrip().startswith(b"{")
        return Found(FtwReader.format, partial(FtwReader, index_name=file.name)) if is_index else None

    def extents(self, tensor: TensorInfo) -> tuple[Extent, ...]:
        """Return where the bytes of one of `tensors` lie: one run for each shard that it spans."""
        if tensor.shard:
            return (Extent(self._file_of_side_file[tensor.shard], tensor.offset, tensor.nbytes),)
        extents: list[Extent] = []
        offset, end = tensor.offset, tensor.offset + tensor.nbytes
        shard = max(bisect_right(self._shard_offsets, offset) - 1, 0)
        while offset < end:
            start = self._shard_offsets[shard]
            taken = min(end, start + self._shards[shard].nbytes) - offset
            if taken:
                extents.append(Extent(shard, offset - start, taken))
            offset += taken
            shard += 1
        return tuple(extents)

    def block_order(self, tensor: TensorInfo) -> None:
        """Return None: the format is little-endian."""

    def gguf_metadata(self) -> tuple[Mapping[str, Any], Path] | None:
        """Return the copy of the metadata of the GGUF that this was made from, once it is checked against the index.

        Raises:
            CheckpointError: It is not what the index records of it, or not a GGUF.
        """
        copy = self._gguf_copy
        self._check_gguf_copy(copy)
        return None if copy is None else (read_gguf_metadata(copy), copy.path)

    def derived_files(self) -> tuple[DerivedFile, ...]:
        """Return the copy of the metadata of the GGUF that this was made from, if there is one."""
        copy = self._gguf_copy
        return () if copy is None else (DerivedFile(GGUF_METADATA_NAME, copy.nbytes, lambda: _iter_content(copy)),)

    def _error(self, subject: str, problem: str) -> CheckpointError:
        return CheckpointError(self._index_path, subject, problem)

    def _open_shards(self, index: dict[str, Any]) -> tuple[WeightFile, ...]:
        files: list[WeightFile] = []
        names: set[str] = set()
        position = 0
        for number, (name, offset, nbytes) in enumerate(self._shards):
            subject = f"shard {number}"
            if offset != position:
                raise self._error(subject, f"global_off is {short_repr(offset)}, {short_repr(position)} is needed")
            if nbytes > index["shard_limit"]:
                raise self._error(subject, f"nbytes is {short_repr(nbytes)}, at most shard_limit is allowed")
            if name in names:
                raise self._error(subject, f"file '{printable(name)}' occurs twice, names must be unique")
            names.add(name)
            files.append(self._open_shard(name, nbytes))
            position += nbytes
        if position != index["total_bytes"]:
            problem = f"is {short_repr(index['total_bytes'])}, the shards hold {short_repr(position)}"
            raise self._error("total_bytes", problem)
        return tuple(files)

    def _open_shard(self, name: str, nbytes: int) -> WeightFile:
        """Open a shard; one that is broken is a problem, which whoever opens the checkpoint may raise."""
        try:
            file = self.place.open_file(name)
        except CheckpointError as error:
            self._problems.append(error.with_traceback(None))  # whose frames would stay in memory
            return cast("WeightFile", _MissingFile(self.place.folder / name))
        if file.nbytes != nbytes:
            problem = f"is {file.nbytes} bytes long, the index says {short_repr(nbytes)}"
            self._problems.append(CheckpointError(file.path, "file", problem))
        return file

    def _place_tensors(self, tensors: list[TensorInfo], total_bytes: int) -> dict[str, TensorInfo]:
        """Return tensors by name in the order of their bytes, after checking where they lie."""
        tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
        placed: dict[str, TensorInfo] = {}
        position = 0
        for tensor in tensors:
            if tensor.name in placed:
                raise self._error(tensor.name, "occurs twice, names must be unique")
            placed[tensor.name] = tensor
            if tensor.offset > total_bytes:
                problem = f"begins at {short_repr(tensor.offset)}, the shards hold {short_repr(total_bytes)} bytes"
                raise self._error(tensor.name, problem)
            if tensor.nbytes and tensor.offset < position:
                problem = f"begins at {short_repr(tensor.offset)} and overlaps the tensor before it"
                raise self._error(tensor.name, problem)
            position = max(position, tensor.offset + align_up(tensor.nbytes, ALIGNMENT))
            if position > total_bytes:
                problem = f"ends at {short_repr(position)} with its padding"
                raise self._error(tensor.name, f"{problem}, the shards hold {short_repr(total_bytes)} bytes")
        return placed

    def _read_side_files(self, names: object) -> None:
        """Add the tensors of the side files; if the region holds one too, the region counts."""
        if names is None:
            return
        if not isinstance(names, list) or not all(_is_in_folder(name) for name in names):
            problem = f"is {short_repr(names)}, a list of file names in the same folder is needed"
            raise self._error("side_files", problem)
        region = set(self.tensors)
        files = list(self.files)
        for name in names:
            if name in self._file_of_side_file:
                raise self._error("side_files", f"'{printable(name)}' occurs twice, names must be unique")
            file = self.place.open_file(name)
            self._file_of_side_file[name] = len(files)
            files.append(file)
            for tensor in read_safetensors_header(file, name, self._budget).tensors.values():
                other = self.tensors.setdefault(tensor.name, tensor)
                if other is not tensor and tensor.name not in region:
                    problem = f"lies in {printable(other.shard)} too, and the index does not say which one counts"
                    raise CheckpointError(file.path, tensor.name, problem)
        self.files = tuple(files)

    def _open_gguf_copy(self) -> WeightFile | None:
        if not self.place.has(GGUF_METADATA_NAME):
            return None
        file = self.place.open_file(GGUF_METADATA_NAME)
        check_gguf_metadata_size(file.path, file.nbytes)
        return file

    def _check_gguf_copy(self, copy: WeightFile | None) -> None:
        """Check the copy of a GGUF's metadata against the index, if that records it: a verdict rests on it."""
        derived = read_ftw_key(self.metadata, "derived")
        recorded = derived if isinstance(derived, list) else []
        entries = [entry for entry in recorded if isinstance(entry, dict) and entry.get("name") == GGUF_METADATA_NAME]
        if len(entries) > 1:
            raise self._error("derived", f"'{GGUF_METADATA_NAME}' occurs {len(entries)} times, names must be unique")
        if not entries:
            return
        if copy is None:
            path = self.place.folder / GGUF_METADATA_NAME
            raise CheckpointError(path, "file", "is missing, the index says that the checkpoint has it")
        [entry] = entries
        if entry.get("bytes", copy.nbytes) != copy.nbytes:
            problem = f"is {copy.nbytes} bytes long, the index says {short_repr(entry['bytes'])}"
            raise CheckpointError(copy.path, "file", problem)
        hasher = xxhash.xxh3_64()
        for piece in _iter_content(copy):
            hasher.update(piece)
        if hasher.hexdigest() != entry.get("xxh3_64"):
            problem = f"checksum is {hasher.hexdigest()}, the index says {short_repr(entry.get('xxh3_64'))}"
            raise CheckpointError(copy.path, "file", problem)


class _MissingFile:
    """A shard that cannot be opened, in the place of the `WeightFile` that it would be."""

    nbytes = 0

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_into(self, offset: int, view: memoryview) -> None:
        raise CheckpointError(self.path, "file", f"is missing, {len(view)} bytes of it at {offset} are needed")

    def read(self, offset: int, nbytes: int) -> bytes:
        raise CheckpointError(self.path, "file", f"is missing, {nbytes} bytes of it at {offset} are needed")


def _is_in_folder(name: object) -> bool:
    return isinstance(name, str) and is_name_inside(name, is_flat=True)


def _iter_content(file: WeightFile) -> Iterator[bytes]:
    """Yield the bytes of a file, at most 1 MiB at a time."""
    for offset in range(0, file.nbytes, _CHUNK_NBYTES):
        yield file.read(offset, min(_CHUNK_NBYTES, file.nbytes - offset))
