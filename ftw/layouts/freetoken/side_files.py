"""Side files: safetensors files beside an FTW, whose tensors FreeToken's server reads from there.

    SideFile      tensors as they are, under their own names; a new file begins once one holds 4 GiB
    CopiedShard   a whole file of the source

None is built in memory: of each any range can be read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from ftw.dtypes import DTYPES
from ftw.errors import CheckpointError
from ftw.layouts.recipes.recipe import Given, Run, join

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ftw.checkpoint import Checkpoint
    from ftw.files import WeightFile
    from ftw.layouts.recipes.recipe import Read, Recipe
    from ftw.tensors import TensorInfo

SIDE_FILE_NBYTES = 4 << 30
_NAME = "ple-table-{:05d}.safetensors"
_HEADER_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class SideFile:
    """A file beside an FTW.

    Attributes:
        name: Its name.
        tensors: Names of the tensors that are in it, in their order there.
        recipe: How its bytes are made.
    """

    name: str
    tensors: tuple[str, ...]
    recipe: Recipe
    _read: Read

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.recipe.nbytes

    def read_into(self, buffer: Any, *, offset: int = 0) -> None:
        """Fill a buffer with its bytes, from its byte `offset` on.

        Raises:
            CheckpointError: A file of the checkpoint has changed.
            OSError: The disk fails; it names the file.
        """
        self.recipe.read_into(memoryview(buffer).cast("B"), offset, self._read)


@dataclass(frozen=True, slots=True)
class CopiedShard:
    """A shard of the source beside an FTW.

    Attributes:
        name: Its name there, without the folders that it lies in: the server looks at no others.
        tensors: Names of the tensors in it, also of those that are not read from there.
        file: The source's file.
    """

    name: str
    tensors: tuple[str, ...]
    file: WeightFile

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.file.nbytes

    def read_into(self, buffer: Any, *, offset: int = 0) -> None:
        """Fill a buffer with its bytes, from its byte `offset` on.

        Raises:
            CheckpointError: The file has changed.
            OSError: The disk fails; it names the file.
        """
        self.file.read_into(offset, memoryview(buffer).cast("B"))


def plan_side_files(tensors: Iterable[TensorInfo], read: Read) -> tuple[SideFile, ...]:
    """Return the files that hold some of a checkpoint's tensors; `read` fills a view with bytes of one."""
    batches = enumerate(_iter_batches(tensors))
    return tuple(_plan_file(_NAME.format(number), batch, read) for number, batch in batches)


def plan_copied_shards(checkpoint: Checkpoint, names: Iterable[str]) -> tuple[CopiedShard, ...]:
    """Return the shards that hold some tensors of a checkpoint, by their names.

    Raises:
        CheckpointError: Two of them have the same name, in different folders.
    """
    numbers = dict.fromkeys(extent.file for name in names for extent in checkpoint.extents(name))
    shards: dict[int, list[str]] = {number: [] for number in numbers}
    for name in checkpoint.tensors if shards else ():
        for extent in checkpoint.extents(name):
            if extent.file in shards:
                shards[extent.file].append(name)
    found: dict[str, CopiedShard] = {}
    for number, tensors in shards.items():
        file = checkpoint.files[number]
        name = PurePosixPath(file.path).name
        if name in found:
            problem = f"and {found[name].file.path} both hold tables, and must lie beside the FTW under one name"
            raise CheckpointError(checkpoint.source, str(file.path), problem)
        found[name] = CopiedShard(name, tuple(tensors), file)
    return tuple(found[name] for name in sorted(found))


def _iter_batches(tensors: Iterable[TensorInfo]) -> Iterator[list[TensorInfo]]:
    batch: list[TensorInfo] = []
    nbytes = 0
    for tensor in tensors:
        batch.append(tensor)
        nbytes += tensor.nbytes
        if nbytes >= SIDE_FILE_NBYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _plan_file(name: str, batch: list[TensorInfo], read: Read) -> SideFile:
    """Lay a file out as the safetensors package does: wide elements first, so that all are aligned, then by name."""
    batch = sorted(batch, key=lambda tensor: (-DTYPES[tensor.dtype].bits, tensor.name.encode()))
    entries, offset = {}, 0
    for tensor in batch:
        end = offset + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _HEADER_ALIGNMENT)
    runs: list[Recipe] = [Run(tensor.name, 0, tensor.nbytes) for tensor in batch if tensor.nbytes]
    start = Given(len(header).to_bytes(8, "little") + header)
    return SideFile(name, tuple(tensor.name for tensor in batch), join([start, *runs]), read)
