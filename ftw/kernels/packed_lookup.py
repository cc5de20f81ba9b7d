"""Lookup in a table of packed rows: out[i, :] = decode(table[ids[i] - first_id, :]), zeros for ids outside of it.

    table   [rows, row_bytes]   uint8, rows as GGUF stores them; host memory that the device can read, or device memory
    ids     any shape           int32 or int64, on the CPU or on the device
    first_id                    id of the table's first row: 0, or where a shard of the vocabulary begins
    out     ids.shape + [columns], float32, bfloat16 or float16, on the ids' device

Values are computed in float32, in the order of the gguf package's decoders, and equal to theirs in every bit; bfloat16
and float16 are rounded from that to nearest, ties to even. Only which NaN a NaN is may differ: its sign and payload are
the processor's.

From host memory the packed bytes of many rows cross the link once, in wide loads, and wait in the output for being
decoded: they are never longer than it is. The limit is the link, 55.3 GB/s on an H200 with PCIe 5.0 x16 (copy engine,
2026-11-30). It is asked for lines of 128 bytes, of which the sectors of 32 bytes that are wanted cross it, at a cost of
about 0.5 ns for a line and 0.5 ns for a sector: rows that are not whole lines cannot reach what whole lines do (0.92).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ftw.errors import LookupArgumentError
from ftw.ggml_types import PACKED_TYPES, GgmlType, ggml_types_by_name
from ftw.kernels.arguments import check_arguments, make_out, on_device
from ftw.kernels.codebooks import codebook
from ftw.kernels.packed_lookup_reference import packed_lookup_reference

OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_UNIT_NBYTES = (4, 2, 1)
_LINE_NBYTES = 128
_NUM_WARPS = 4
# On an H200 (2026-11-30), for tables in host memory of 2048 values: one row took 3 % less in runs of 1024 than of 2048,
# many rows 4 % to 20 % more. 8 warps were no better; decoding straight from host memory was 5 % faster for one row of
# most types, and 40 % slower for IQ3_S, whose blocks have five parts.
_FEW_ROWS = 64
_FEW_ROWS_ELEMENTS = 1024
_MAX_ELEMENTS = 2048


class _Plan(NamedTuple):
    """How a lookup is cut into programs, one for `elements` values of a row.

    With `is_few` there are so few rows that latency counts. With `is_staged` their packed bytes are fetched first, by
    `units` lanes of `unit_nbytes` bytes each.
    """

    elements: int
    is_few: bool
    is_staged: bool
    unit_nbytes: int
    units: int


def packed_lookup(
    table: torch.Tensor,
    ids: torch.Tensor,
    ggml_type: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    first_id: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Look up packed rows and decode them; an id outside the table gives a row of zeros.

    Runs on the ids' device, there on its current stream, and can be captured in a CUDA graph; call it once before, or
    `prepare`. For CPU ids the table has to be in host memory.

    Args:
        table: uint8 `[rows, row_bytes]`, contiguous. For ids on a device: memory of that device, or page-locked host
            memory.
        ids: int32 or int64, of any shape and strides.
        ggml_type: A key of `ftw.ggml_types.PACKED_TYPES`.
        dtype: Of the values: float32, bfloat16 or float16.
        first_id: Id of the first row, not negative.
        out: Contiguous, `ids.shape + (columns,)`, of that dtype, on the ids' device; made where it is None.

    Raises:
        LookupArgumentError: An argument has a type, shape, dtype or device that is not allowed.
    """
    check_arguments("packed_lookup", table, ids, first_id)
    columns = packed_columns(table, ggml_type)
    if dtype not in OUT_DTYPES:
        allowed = ", ".join(map(str, OUT_DTYPES))
        raise LookupArgumentError(f"packed_lookup: dtype: found {dtype}, allowed are {allowed}")
    out = make_out("packed_lookup", ids, columns, dtype, out)
    if not out.numel():
        return out
    if not table.shape[0]:
        return out.zero_()
    if ids.device.type == "cpu":
        packed_lookup_reference(table, ids, out, ggml_type, first_id)
        return out
    with on_device(ids):
        launch(table, ids, out, ggml_type, first_id)
    return out


def packed_columns(table: torch.Tensor, ggml_type: str) -> int:
    """Return how many values a row of a packed table holds.

    Raises:
        LookupArgumentError: The type is not one that is looked up, or the rows are not whole blocks of it.
    """
    known = ggml_types_by_name().get(ggml_type)
    if known is None or ggml_type not in PACKED_TYPES:
        problem = f"found {ggml_type!r}, allowed are {', '.join(PACKED_TYPES)}"
        raise LookupArgumentError(f"packed_lookup: ggml_type: {problem}")
    if table.dtype != torch.uint8 or table.ndim != 2 or table.shape[1] % known.type_size:
        found = f"{table.dtype} {list(table.shape)}"
        problem = f"found {found}, uint8 rows of whole blocks of {known.type_size} bytes are needed for {ggml_type}"
        raise LookupArgumentError(f"packed_lookup: table: {problem}")
    return int(table.shape[1]) // known.type_size * known.block_size


def prepare(ggml_type: str, device: torch.device) -> None:
    """Put on a device what lookups of a type need there, so that the first one can be captured in a CUDA graph."""
    if device.type == "cuda":
        codebook(ggml_type, device)


def launch(table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, ggml_type: str, first_id: int = 0) -> None:
    """Launch the Triton kernel on the current stream; the arguments have been checked."""
    from ftw.kernels import ggml_decoders_triton
    from ftw.kernels.packed_lookup_triton import UNITS, packed_lookup_kernel

    known = ggml_types_by_name()[ggml_type]
    row_nbytes = table.shape[1]
    columns = row_nbytes // known.type_size * known.block_size
    plan = _plan(table, out, known, columns)
    entries = codebook(ggml_type, ids.device)
    packed_lookup_kernel[(out.numel() // columns, -(-columns // plan.elements))](
        table_ptr=table,
        ids_ptr=ids.contiguous(),
        codebook_ptr=table if entries is None else entries,
        out_ptr=out,
        first_id=first_id,
        table_rows=table.shape[0],
        columns=columns,
        row_nbytes=row_nbytes,
        zero=0,
        DECODE=getattr(ggml_decoders_triton, f"decode_{ggml_type.lower()}"),
        BLOCK_SIZE=known.block_size,
        TYPE_SIZE=known.type_size,
        ELEMENTS=plan.elements,
        IS_STAGED=plan.is_staged,
        UNIT=UNITS[plan.unit_nbytes],
        UNIT_NBYTES=plan.unit_nbytes,
        UNITS=plan.units,
        LINE_NBYTES=_LINE_NBYTES,
        WARM_WORDS=entries.numel() // 4 if entries is not None and plan.is_few and entries.numel() > 16 else 0,
        num_warps=_NUM_WARPS,
        enable_fp_fusion=False,
    )


def _plan(table: torch.Tensor, out: torch.Tensor, known: GgmlType, columns: int) -> _Plan:
    """Cut rows into runs of whole blocks, fetched in the widest units that fit them and both addresses.

    Of few rows the runs are shorter, so that more threads decode each. Decoders load words of two bytes, so rows at odd
    addresses are staged wherever they are.
    """
    is_few = out.numel() // columns <= _FEW_ROWS
    elements = min(_FEW_ROWS_ELEMENTS if is_few else _MAX_ELEMENTS, 1 << (columns - 1).bit_length())
    is_odd = table.data_ptr() % 2 == 1 and known.type_size % 2 == 0
    is_staged = is_odd or table.device.type == "cpu"
    run_nbytes = known.row_nbytes(elements)
    alignment = table.shape[1] | run_nbytes | table.data_ptr() | out.data_ptr()
    unit_nbytes = next(nbytes for nbytes in _UNIT_NBYTES if alignment % nbytes == 0)
    units = 1 << ((run_nbytes + _LINE_NBYTES) // unit_nbytes - 1).bit_length()  # may begin anywhere in a line
    return _Plan(elements, is_few, is_staged, unit_nbytes, units)
