"""Layouts: which tensors an FTW gets, those of the source as they are or as FreeToken's models load them.

plain         the tensors of the source, under their own names
freetoken     fused, renamed and gathered in banks of experts, as FreeToken's server needs them
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from ftw.readers import read_ftw_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ftw.checkpoint import Checkpoint
    from ftw.files import WeightFile
    from ftw.readers import LeftOut
    from ftw.tensors import TensorInfo

Layout = Literal["plain", "freetoken"]
LAYOUTS: tuple[str, ...] = get_args(Layout)
LAYOUT_KEY = "layout"  # below "ftw" in an index; one without it is plain
_FREETOKENS_KEY = "fingerprint"  # which FreeToken writes, and copies of its FTWs keep


class SideFile(Protocol):
    """A file beside an FTW that holds tensors."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    def read_into(self, buffer: Any, *, offset: int = 0) -> None:
        """Fill a buffer with its bytes, from its byte `offset` on."""


class Arrangement(Protocol):
    """The tensors of an FTW, read out of those of a checkpoint."""

    @property
    def layout(self) -> str:
        """Its name, one of `LAYOUTS`."""

    @property
    def source(self) -> str:
        """The checkpoint's name, for messages."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """By name, in the order in which they are written."""

    @property
    def side_files(self) -> Sequence[SideFile]:
        """Files that lie beside the FTW, with tensors that an engine reads from there."""

    @property
    def beside(self) -> Mapping[str, TensorInfo]:
        """The tensors in side files, by name."""

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Tensors of the checkpoint that nothing is made of, with the reason."""

    @property
    def index_entries(self) -> Mapping[str, Any]:
        """Further keys of the index."""

    def find_copy(self, name: str) -> str | None:
        """Return the name of the tensor that holds one of the checkpoint's as it is, None if none does."""

    def find_bytes(self, name: str, offset: int, nbytes: int) -> tuple[WeightFile, int] | None:
        """Return which file holds bytes of a tensor as they are, and from where on; None if they must be made."""

    def read_into(self, name: str, buffer: Any, *, offset: int = 0) -> None:
        """Fill a buffer with bytes of a tensor, from its byte `offset` on."""

    def read_many(self, requests: Iterable[tuple[str, Any, int]], *, num_threads: int | None = None) -> None:
        """Fill several buffers, each with bytes of a tensor from an offset on."""


class PlainArrangement:
    """The tensors of a checkpoint as they are."""

    layout = "plain"
    side_files: tuple[SideFile, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.source = checkpoint.source
        self.tensors = checkpoint.tensors
        self.beside: Mapping[str, TensorInfo] = {}
        self.index_entries: Mapping[str, Any] = {}
        self.find_bytes = checkpoint.find_bytes
        self.read_into = checkpoint.read_into
        self.read_many = checkpoint.read_many

    def find_copy(self, name: str) -> str | None:
        """Return the same name."""
        return name


def arrange(checkpoint: Checkpoint, layout: str) -> Arrangement:
    """Return the tensors of a checkpoint in a layout.

    Raises:
        CheckpointError: FreeToken serves no such model, or a tensor that its model needs is missing.
        ValueError: There is no such layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}, allowed are {', '.join(LAYOUTS)}")
    if layout == "plain":
        return PlainArrangement(checkpoint)
    from ftw.layouts.freetoken.arrangement import FreetokenArrangement  # a table of families, which others do without

    return FreetokenArrangement(checkpoint)


def layout_of(checkpoint: Checkpoint) -> str:
    """Return the layout in which an FTW says that it was converted, by ftw or FreeToken; "plain" of any other."""
    layout = read_ftw_key(checkpoint.metadata, LAYOUT_KEY)
    if isinstance(layout, str) and layout in LAYOUTS:
        return layout
    is_freetokens = checkpoint.format == "ftw" and _FREETOKENS_KEY in checkpoint.metadata
    return "freetoken" if is_freetokens and not checkpoint.config.is_gguf else "plain"


def find_obstacle(checkpoint: Checkpoint) -> str | None:
    """Return what stands against FreeToken 0.2.1 serving an FTW; None if nothing that can be seen without reading it.

    Names, and types and counts as far as they tell; the bytes are what `ftw verify` is for.
    """
    from ftw.layouts.freetoken.served import find_obstacle as find  # as above

    return find(checkpoint)
