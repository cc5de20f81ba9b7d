"""The kernel of `ftw.kernels.lookup`. Grid: (ids, blocks of one row)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def lookup_kernel(table_ptr, ids_ptr, out_ptr, first_id, table_rows, row_units, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy one block of one row, or zeros for an id outside the table.

    table_ptr [table_rows, row_units], ids_ptr [programs of axis 0], out_ptr [programs of axis 0, row_units]; a unit is
    an integer of 1, 2 or 4 bytes. first_id, not negative, is the id of the first row.
    """
    position = tl.program_id(0).to(tl.int64)
    token = tl.load(ids_ptr + position).to(tl.int64)
    row = token - first_id  # wraps around for ids far below, which the first condition sorts out
    is_inside = (token >= first_id) & (row < table_rows)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # Masked lanes read nothing, so an address far outside the table is never touched.
    readable_units = tl.where(is_inside, row_units, 0)
    units = tl.load(table_ptr + row * row_units + columns, mask=columns < readable_units, other=0)
    tl.store(out_ptr + position * row_units + columns, units, mask=columns < row_units)
