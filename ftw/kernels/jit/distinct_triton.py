"""The kernels of `ftw.kernels.distinct`, which come before and after the one that fetches rows."""

from __future__ import annotations

import triton
import triton.language as tl

from ftw.kernels.jit.rows_triton import find_owner, find_rows

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"


@triton.jit
def elect_kernel(ids_ptr, owners_ptr, num_ids, first_id, table_rows, BLOCK: tl.constexpr):
    """Write the position of each id of a block to its row's entry; whoever comes last owns the row.

    ids_ptr [num_ids], owners_ptr int32 [table_rows]. Grid: (blocks of ids).
    """
    positions = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # In the place of an id behind the last one stands one that is outside every table.
    tokens = tl.load(ids_ptr + positions, mask=positions < num_ids, other=-1).to(tl.int64)
    rows, is_inside = find_rows(tokens, first_id, table_rows)
    tl.store(owners_ptr + rows, positions.to(tl.int32), mask=is_inside)


@triton.jit
def spread_kernel(out_ptr, ids_ptr, owners_ptr, first_id, table_rows, out_units, BLOCK: tl.constexpr):
    """Copy one block of a fetched row from its owner's place in the output to this one's, unless that is the owner.

    out_ptr [programs of axis 0, out_units], the rest as above. Grid: (ids, blocks of one row of the output).
    """
    position = tl.program_id(0).to(tl.int64)
    token = tl.load(ids_ptr + position).to(tl.int64)
    row, is_inside = find_rows(token, first_id, table_rows)
    owner, is_other = find_owner(owners_ptr, row, is_inside, position)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_copied = columns < tl.where(is_other, out_units, 0)
    units = tl.load(out_ptr + owner.to(tl.int64) * out_units + columns, mask=is_copied, other=0)
    tl.store(out_ptr + position * out_units + columns, units, mask=is_copied)
