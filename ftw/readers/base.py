"""The one seam between formats and the rest: what a format finds at a place, and what a reader offers of it.

`Reader.find` looks at names and an index alone. The constructor reads headers and checks every length and offset in
them against the files; it raises `CheckpointError` if one is wrong. After that a reader holds no descriptor, and
threads may share it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from ftw.errors import CheckpointError
    from ftw.files import WeightFile
    from ftw.hub import Place
    from ftw.tensors import Extent, TensorInfo


class LeftOut(NamedTuple):
    """Something of the source that is not part of the checkpoint, and why: a file, or one tensor's stale copy."""

    kind: Literal["file", "tensor"]
    name: str
    reason: str


class FileHead(NamedTuple):
    """How a file of `nbytes` bytes begins."""

    name: str
    first: bytes
    nbytes: int


class DerivedFile(NamedTuple):
    """A file of `nbytes` bytes that lies beside the weights in an FTW: what the source keeps in its weight files."""

    name: str
    nbytes: int
    read: Callable[[], Iterator[bytes]]


class Found(NamedTuple):
    """A checkpoint, as the names of files and an index describe it.

    Attributes:
        format: "ftw", "gguf" or "safetensors".
        open: Returns its reader, of the place and this.
        files: Names of the weight files, in order, relative to the folder; none if the reader finds them out.
        is_listed: Whether an index or the user named them; otherwise they are those that the folder has.
        left_out: What lies beside them and is not taken.
        warnings: What was taken one way and could have been meant another.
    """

    format: str
    open: Callable[[Place, Found], Reader]
    files: tuple[str, ...] = ()
    is_listed: bool = False
    left_out: tuple[LeftOut, ...] = ()
    warnings: tuple[str, ...] = ()


class Reader(Protocol):
    """A checkpoint whose headers have been read.

    Attributes:
        format: "ftw", "gguf" or "safetensors".
        place: Where it was opened; config.json and the other metadata files lie there too.
        files: The files that hold the weights.
        left_out: What lies beside them and was not taken.
        warnings: What was taken one way and could have been meant another.
        problems: Shards of an FTW that are missing, or too long or short; tensors that an index places in a file that
            does not hold them.
    """

    format: ClassVar[str]
    place: Place
    files: tuple[WeightFile, ...]
    left_out: tuple[LeftOut, ...]
    warnings: tuple[str, ...]
    problems: tuple[CheckpointError, ...]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What the headers say, by name, in the order of the bytes on disk."""
        ...

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Free key-values of the format."""
        ...

    @staticmethod
    def find(place: Place) -> Found | None:
        """Return the checkpoint of this format that lies at a place; None if nothing there is called like one."""
        ...

    @staticmethod
    def recognise(file: FileHead) -> Found | None:
        """Return the checkpoint in a file of any name, by its first bytes; None if it is not of this format."""
        ...

    def extents(self, tensor: TensorInfo) -> tuple[Extent, ...]:
        """Return where the bytes of one of `tensors` lie, in order."""
        ...

    def block_order(self, tensor: TensorInfo) -> tuple[int, ...] | None:
        """Return how the bytes of each block of one of `tensors` have to be rearranged to be little-endian.

        Byte i of a block comes from byte `order[i]` of the stored one; None if they need no rearranging.
        """
        ...

    def gguf_metadata(self) -> tuple[Mapping[str, Any], Path] | None:
        """Return the metadata of the GGUF that this is or was made from, and the file that holds them."""
        ...

    def derived_files(self) -> tuple[DerivedFile, ...]:
        """Return the files that an FTW made from this checkpoint needs besides copies of its metadata files."""
        ...
