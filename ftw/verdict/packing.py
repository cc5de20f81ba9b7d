"""Packing: how the rows of a packed table lie in it, from what its checkpoint records or leaves open.

ftw records the GGUF type and the shape before packing. FreeToken records neither, and appends rows of zeros: there the
type is the one of which a row of `embedding_length` values takes the bytes that a row has; where that is true of
several, `general.file_type` has to leave one of them. The metadata's count of tokens tells the true rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ftw.checkpoint import FILE_TYPE_KEY
from ftw.errors import FtwError
from ftw.ggml_types import PACKED_TYPES, GgmlType, file_type_name, ggml_types_by_name, unknown_type

if TYPE_CHECKING:
    from ftw.checkpoint import ModelConfig
    from ftw.tensors import TensorInfo

# FreeToken pads a table whose width is no multiple of this, so that reads of whole runs stay inside.
_FREETOKEN_RUN = 512
# What llama.cpp gives the token embedding of files named after types that are too small for it.
_EMBEDDING_TYPES = {
    "IQ1_S": "Q2_K", "IQ1_M": "Q2_K", "IQ2_XXS": "Q2_K", "IQ2_XS": "Q2_K", "IQ2_S": "IQ3_S", "IQ2_M": "IQ3_S",
    "IQ3_XXS": "IQ3_S", "TQ1_0": "Q4_K", "TQ2_0": "Q4_K", "MXFP4_MOE": "Q8_0",
}  # fmt: skip


class Packing(NamedTuple):
    """Rows of `columns` values each, packed in blocks of `ggml_type`; rows after the first `rows` are padding."""

    ggml_type: str
    rows: int
    columns: int


class UnknownPackingError(FtwError):
    """Rows cannot be unpacked; the message says why. A verdict turns it into its detail."""


def find_packing(tensor: TensorInfo, config: ModelConfig) -> Packing | None:
    """Return how a table is packed, None for one that is not.

    Raises:
        UnknownPackingError: It is, in a way that the checkpoint does not tell or that no lookup unpacks.
    """
    if tensor.ggml_type is not None:
        return _recorded(tensor, tensor.ggml_type)
    if config.is_gguf and tensor.dtype == "U8" and len(tensor.shape) == 2:
        return _inferred(tensor, config)
    return None


def _recorded(tensor: TensorInfo, name: str) -> Packing:
    if name not in PACKED_TYPES:
        raise UnknownPackingError(f"its rows are packed as {name}, which no lookup unpacks")
    known = ggml_types_by_name().get(name)
    if known is None:
        raise UnknownPackingError(f"its rows are packed as {name}, {unknown_type(name)}")
    shape = tensor.logical_shape
    if shape is None or len(shape) != 2 or len(tensor.shape) != 2 or tensor.dtype != "U8":
        found = f"{tensor.dtype} {list(tensor.shape)} with logical_shape {shape and list(shape)}"
        raise UnknownPackingError(f"its rows are packed as {name}, but it is {found}")
    rows, columns = shape
    if not rows:
        raise UnknownPackingError(f"its logical_shape is {list(shape)}, which has no rows")
    if columns % known.block_size or known.row_nbytes(columns) != tensor.shape[1] or rows > tensor.shape[0]:
        found = f"it is {list(tensor.shape)} with logical_shape {list(shape)}"
        raise UnknownPackingError(
            f"its rows are packed as {name}, of which {known.type_size} bytes hold "
            f"{known.block_size} values, but {found}"
        )
    return Packing(name, rows, columns)


def _inferred(tensor: TensorInfo, config: ModelConfig) -> Packing:
    stored_rows, row_nbytes = tensor.shape
    columns = config.hidden_size
    if not columns:
        raise UnknownPackingError("its index records no ggml_type, and the metadata no embedding_length to find it by")
    fitting = [
        known
        for known in ggml_types_by_name().values()
        if known.name in PACKED_TYPES and not columns % known.block_size and known.row_nbytes(columns) == row_nbytes
    ]
    known = _choose_type(fitting, row_nbytes, columns, config)
    padding = _freetoken_padding(columns)
    if not padding or config.vocab_size == stored_rows:  # FreeToken 0.1 did not pad
        return Packing(known.name, stored_rows, columns)
    if config.vocab_size != stored_rows - padding:
        found = f"of its {stored_rows} rows {padding} may be padding"
        told = f"the metadata tell of {config.vocab_size or 'no'} tokens"
        raise UnknownPackingError(f"its index records no logical_shape: {found}, and {told}")
    return Packing(known.name, stored_rows - padding, columns)


def _choose_type(fitting: list[GgmlType], row_nbytes: int, columns: int, config: ModelConfig) -> GgmlType:
    names = [known.name for known in fitting]
    unrecorded = f"its index records no ggml_type; rows of {row_nbytes} bytes for {columns} values"
    if not fitting:
        raise UnknownPackingError(f"{unrecorded} are of no type that is looked up")
    if len(fitting) == 1:
        return fitting[0]
    file_type = file_type_name(config.raw.get(FILE_TYPE_KEY))
    for wanted in (_EMBEDDING_TYPES.get(file_type), *_prefixes(file_type)):
        if wanted in names:
            return fitting[names.index(wanted)]
    told = f"{FILE_TYPE_KEY} is {file_type or 'missing'}"
    raise UnknownPackingError(f"{unrecorded} may be {' or '.join(names)}, and {told}; convert it with ftw")


def _prefixes(file_type: str) -> list[str]:
    """Return what a file's type may be named after: Q4_K_M, Q4_K, Q4."""
    parts = file_type.split("_")
    return ["_".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _freetoken_padding(columns: int) -> int:
    missing = -columns % _FREETOKEN_RUN
    return -(-missing // columns)
