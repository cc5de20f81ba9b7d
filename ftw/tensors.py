"""TensorInfo: what a checkpoint's header says of one tensor, and Extent: where a run of its bytes lies."""

from __future__ import annotations

from typing import NamedTuple

EXPERTS_BANK = "experts_bank"


class TensorInfo(NamedTuple):
    """One tensor of a checkpoint, without its data. A tuple, since a frozen dataclass takes four times as long to make.

    Attributes:
        name: Its name in the checkpoint.
        dtype: Its element type, a key of `ftw.dtypes.DTYPES`.
        shape: Its shape, slowest dimension first; empty for a scalar.
        offset: Where it starts, in bytes: in its shard (safetensors), or in the logical region of all shards (FTW).
        nbytes: Its size in bytes, padding left out.
        shard: The file that holds it, relative to the checkpoint's folder; empty for a tensor of an FTW region.
        kind: "weight", or "experts_bank" in an FTW.
        role: What a lookup table is for, such as "token_embedding", where the checkpoint records it.
        placement: "host" for a table that was laid out to be read from host memory.
        ggml_type: The GGUF type of packed rows, such as "Q4_0".
        logical_shape: `[rows, columns]` before packing.
        xxh3_64: Checksum of the tensor's bytes, against accidents.
        sha256: The same, against intent; few checkpoints record it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    shard: str = ""
    kind: str = "weight"
    role: str | None = None
    placement: str | None = None
    ggml_type: str | None = None
    logical_shape: tuple[int, ...] | None = None
    xxh3_64: str | None = None
    sha256: str | None = None

    def is_alike(self, other: TensorInfo) -> bool:
        """Tell whether equal bytes would mean equal tensors: types and shapes are the same, packed or not."""
        mine = (self.dtype, self.shape, self.ggml_type, self.logical_shape)
        return mine == (other.dtype, other.shape, other.ggml_type, other.logical_shape)

    def describe(self) -> str:
        """Return type and shape as messages show them, such as "BF16 [64, 8]" or "Q4_0 [64, 256]"."""
        return f"{self.ggml_type or self.dtype} {list(self.logical_shape or self.shape)}"


class Extent(NamedTuple):
    """A run of bytes of one file: `file` is an index into the reader's `files`; `offset` and `nbytes` are in bytes."""

    file: int
    offset: int
    nbytes: int
