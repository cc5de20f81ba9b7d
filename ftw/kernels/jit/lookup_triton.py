"""The kernel of `ftw.kernels.lookup`. Grid: (ids, blocks of one row)."""

from __future__ import annotations

import triton
import triton.language as tl

from ftw.kernels.jit.rounding_triton import rounded, widened
from ftw.kernels.jit.rows_triton import count_row, find_owner, find_rows, find_slots

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"


@triton.jit
def lookup_kernel(
    table_ptr,
    ids_ptr,
    out_ptr,
    slots_ptr,
    hot_ptr,
    counts_ptr,
    owners_ptr,
    first_id,
    table_rows,
    row_units,
    out_units,
    scale,
    BLOCK: tl.constexpr,
):
    """Copy one block of one row, or zeros for an id outside the table.

    table_ptr [table_rows, row_units], ids_ptr [programs of axis 0], out_ptr [programs of axis 0, out_units]; a unit is
    an integer of 1, 2 or 4 bytes. first_id, not negative, is the id of the first row. What is None is compiled out:

    slots_ptr    int32 [table_rows]: rows whose slot is not negative are read from hot_ptr [slots, row_units] instead
    counts_ptr   int32 [table_rows]: the row's count goes up by 1
    owners_ptr   int32 [table_rows]: a row is fetched at the position that owns it, and not written at the others
    out_units    of a part of each row, at whose start in the first row table_ptr and hot_ptr then point; else row_units
    scale        what values are multiplied by, in float32; a unit is then a value of floating point
    """
    position = tl.program_id(0).to(tl.int64)
    token = tl.load(ids_ptr + position).to(tl.int64)
    row, is_inside = find_rows(token, first_id, table_rows)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width = out_units if out_units is not None else row_units
    written_units = width
    source = table_ptr + row * row_units
    is_read = is_inside
    if slots_ptr is not None:
        slot = find_slots(slots_ptr, row, is_inside)
        # One load from either place, so that a row is one wait for memory.
        source = tl.where(slot >= 0, hot_ptr + slot.to(tl.int64) * row_units, source)
    if owners_ptr is not None:
        _, is_other = find_owner(owners_ptr, row, is_inside, position)
        is_read = is_inside & (is_other == 0)
        written_units = tl.where(is_other, 0, width)
    # Masked lanes read nothing, so an address far outside the table is never touched.
    readable_units = tl.where(is_read, width, 0)
    units = tl.load(source + columns, mask=columns < readable_units, other=0)
    if counts_ptr is not None:
        count_row(counts_ptr, row, is_inside)
    if scale is not None:
        scaled = tl.where(is_inside, widened(units) * scale, 0.0)  # a zero times a negative scale would be -0.0
        units = rounded(scaled, out_ptr.dtype.element_ty)
    tl.store(out_ptr + position * width + columns, units, mask=columns < written_units)
