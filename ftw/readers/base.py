"""The one seam between formats and the rest: what a reader offers once it has parsed a checkpoint's headers.

A reader's constructor takes a folder or a file, reads headers alone, checks every length and offset in them against the
files, and raises `CheckpointError` where one is wrong. After that it holds no descriptor and is safe to share between
threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from ftw.files import WeightFile
    from ftw.tensors import Extent, TensorInfo


class LeftOut(NamedTuple):
    """Something of the source that is not part of the checkpoint, and why: a file, or one tensor's stale copy."""

    kind: Literal["file", "tensor"]
    name: str
    reason: str


class DerivedFile(NamedTuple):
    """A file of `nbytes` bytes that lies beside the weights in an FTW: what the source keeps in its weight files."""

    name: str
    nbytes: int
    read: Callable[[], Iterator[bytes]]


class Reader(Protocol):
    """A checkpoint whose headers have been read.

    Attributes:
        format: "ftw", "gguf" or "safetensors".
        folder: Where config.json and the other metadata files lie.
        files: The files that hold the weights.
        left_out: What lies beside them and was not taken.
        warnings: What was taken one way and could have been meant another.
    """

    format: ClassVar[str]
    folder: Path
    files: tuple[WeightFile, ...]
    left_out: tuple[LeftOut, ...]
    warnings: tuple[str, ...]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What the headers say, by name, in the order of the bytes on disk."""
        ...

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Free key-values of the format."""
        ...

    def __init__(self, path: Path) -> None: ...

    @staticmethod
    def accepts(path: Path) -> bool:
        """Tell whether a file or folder looks like this format, by names alone."""
        ...

    def extents(self, tensor: TensorInfo) -> tuple[Extent, ...]:
        """Return where the bytes of one of `tensors` lie, in order."""
        ...

    def block_order(self, tensor: TensorInfo) -> tuple[int, ...] | None:
        """Return how the bytes of each block of one of `tensors` have to be rearranged to be little-endian.

        Byte i of a block comes from byte `order[i]` of the stored one; None where they lie as they are needed.
        """
        ...

    def derived_files(self) -> tuple[DerivedFile, ...]:
        """Return the files that an FTW made from this checkpoint needs besides copies of its metadata files."""
        ...
