"""Copied shards: whole files of a checkpoint that lie beside an FTW, where FreeToken looks for tables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from ftw.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ftw.checkpoint import Checkpoint
    from ftw.files import WeightFile


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
