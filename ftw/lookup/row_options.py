"""RowOptions: how the rows of a table are looked up, and the module that does so."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ftw.kernels import prepare
from ftw.lookup.embedding import HostEmbedding

if TYPE_CHECKING:
    import torch

    from ftw.pinned import PinnedBuffer


class RowOptions(NamedTuple):
    """What `HostEmbedding` takes under the same names: how it reads the rows of a table."""

    dtype: torch.dtype | None = None
    ggml_type: str | None = None
    vocab_range: tuple[int, int] | None = None
    hot_bytes: int | None = None
    scale: float | None = None
    num_slices: int | None = None
    handle: str | None = None


def make_embedding(
    table: torch.Tensor, name: str, device: torch.device, options: RowOptions, buffer: PinnedBuffer | None = None
) -> HostEmbedding:
    """Return a table as a module that can be captured in a CUDA graph at once.

    Args:
        table: `[rows, columns]`, on the device or in `buffer`.
        name: For messages.
        device: Whose kernels read it.
        options: How they do so.
        buffer: The memory that the table lies in; the module then owns it. None for a table on the device.

    Raises:
        LookupArgumentError: The table cannot be looked up so.
    """
    placement = "gpu" if buffer is None else "host"
    own = options._asdict()
    embedding = HostEmbedding(table, name=name, buffer=buffer, placement=placement, device=device, **own)
    if options.ggml_type is not None:
        prepare(options.ggml_type, device)
    return embedding
