"""Side files: safetensors files beside an FTW, whose tensors FreeToken's server reads from there.

A tensor goes into one as it is, under its own name. A new file begins once one holds 4 GiB. None is built in memory:
each is a header and runs of the source's tensors, of which any range can be read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftw.dtypes import DTYPES
from ftw.layouts.recipes.recipe import Given, Run, join

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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


def plan_side_files(tensors: Iterable[TensorInfo], read: Read) -> tuple[SideFile, ...]:
    """Return the files that hold some of a checkpoint's tensors; `read` fills a view with bytes of one."""
    batches = enumerate(_iter_batches(tensors))
    return tuple(_plan_file(_NAME.format(number), batch, read) for number, batch in batches)


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
