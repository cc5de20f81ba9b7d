"""Lookup in a table of packed rows: out[i, :] = decode(table[ids[i] - first_id, :]), zeros for ids outside of it.

    table   [rows, row_bytes]   uint8, rows as GGUF stores them; host memory that the device can read, or device memory
    ids     any shape           int32 or int64, on the CPU or on the device
    first_id                    id of the table's first row: 0, or where a shard of the vocabulary begins
    columns (start, length)     values of each row that are wanted, in whole blocks
    scale                       what decoded values are multiplied by, once they are rounded; rounded itself before
    hot                         copies of rows on the device, packed, read in the table's place: `ftw.kernels.hot`
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

from typing import TYPE_CHECKING, NamedTuple

import torch

from ftw.errors import LookupArgumentError
from ftw.ggml_types import PACKED_TYPES, GgmlType, ggml_types_by_name
from ftw.kernels.arguments import SCALED_DTYPES, check_arguments
from ftw.kernels.codebooks import codebook
from ftw.kernels.distinct import make_owners, plan_distinct
from ftw.kernels.launching import Launch
from ftw.kernels.operation import LookupOptions, Operation
from ftw.kernels.reference import packed_lookup_reference

if TYPE_CHECKING:
    from ftw.kernels.hot import HotRowBuffers
    from ftw.kernels.launching import Launcher

OUT_DTYPES = SCALED_DTYPES
_UNIT_NBYTES = (4, 2, 1)
_LINE_NBYTES = 128
_OPTIONS = (("num_warps", 4), ("enable_fp_fusion", False))
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
    columns: tuple[int, int] | None = None,
    scale: float | None = None,
    hot: HotRowBuffers | None = None,
    is_distinct: bool = False,
    out: torch.Tensor | None = None,
    launcher: Launcher | None = None,
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
        columns: `(start, length)` of each row, in values, whole blocks; None for all of it.
        scale: Finite and not zero; None for values as they are.
        hot: Copies of packed rows on the ids' device.
        is_distinct: Fetch each distinct row once, which takes 4 bytes of device memory for each row of the table while
            it runs. Worth it where `prefers_distinct` says so.
        out: Contiguous, `ids.shape + (length,)`, of that dtype, on the ids' device; made where it is None.
        launcher: Keeps what has been compiled, so that later calls cost less; None to ask Triton each time.

    Raises:
        LookupArgumentError: An argument has a type, shape, dtype or device that is not allowed.
    """
    options = LookupOptions(first_id, columns, scale, hot, is_distinct, ggml_type, dtype)
    return PACKED_LOOKUP.run(table, ids, out, options, launcher)[0]


def _check(
    table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor | None, options: LookupOptions
) -> tuple[LookupOptions, torch.Tensor]:
    op, dtype = "packed_lookup", options.dtype
    check_arguments(op, table, ids, options.first_id)
    columns = packed_columns(table, options.ggml_type)
    if dtype not in OUT_DTYPES:
        allowed = ", ".join(map(str, OUT_DTYPES))
        raise LookupArgumentError(f"{op}: dtype: found {dtype}, allowed are {allowed}")
    block_size = ggml_types_by_name()[options.ggml_type].block_size
    return options.check(op, table, ids, out, columns=columns, dtype=dtype, block_size=block_size)


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


def plan_launches(table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, options: LookupOptions) -> list[Launch]:
    """Return the launches that look rows up on the ids' device; the arguments have been checked."""
    from ftw.kernels.jit import ggml_decoders_triton
    from ftw.kernels.jit.packed_lookup_triton import UNITS, packed_lookup_kernel

    ids = ids.contiguous()
    owners = make_owners(table, ids) if options.is_distinct else None
    ggml_type = options.ggml_type
    known = ggml_types_by_name()[ggml_type]
    num_rows, row_nbytes = table.shape
    slots, hot_rows, counts = options.hot or (None, None, None)
    if options.columns is not None:
        start, length = (count // known.block_size * known.type_size for count in options.columns)
        table = table[:, start : start + length]
        hot_rows = None if hot_rows is None else hot_rows[:, start : start + length]
    num_columns = table.shape[1] // known.type_size * known.block_size
    plan = _plan(table, out, known, num_columns)
    entries = codebook(ggml_type, ids.device)
    fetch = Launch(
        kernel=packed_lookup_kernel,
        grid=(ids.numel(), -(-num_columns // plan.elements), 1),
        arguments=(
            table,
            ids,
            table if entries is None else entries,
            out,
            slots,
            hot_rows,
            counts,
            owners,
            options.first_id,
            num_rows,
            num_columns,
            row_nbytes,
            options.scale,
            0,
        ),
        constants=(
            getattr(ggml_decoders_triton, f"decode_{ggml_type.lower()}"),
            known.block_size,
            known.type_size,
            plan.elements,
            plan.is_staged,
            UNITS[plan.unit_nbytes],
            plan.unit_nbytes,
            plan.units,
            _LINE_NBYTES,
            entries.numel() // 4 if entries is not None and plan.is_few and entries.numel() > 16 else 0,
        ),
        options=_OPTIONS,
    )
    return [fetch] if owners is None else plan_distinct(fetch, ids, owners, out, first_id=options.first_id)


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
    alignment = table.shape[1] | table.stride(0) | run_nbytes | table.data_ptr() | out.data_ptr()
    unit_nbytes = next(nbytes for nbytes in _UNIT_NBYTES if alignment % nbytes == 0)
    units = 1 << ((run_nbytes + _LINE_NBYTES) // unit_nbytes - 1).bit_length()  # may begin anywhere in a line
    return _Plan(elements, is_few, is_staged, unit_nbytes, units)


PACKED_LOOKUP = Operation(_check, plan_launches, packed_lookup_reference)
