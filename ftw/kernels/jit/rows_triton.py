"""Which row of a table an id means, where it lies, and who fetches it: what the kernels of lookups share."""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"


@triton.jit
def find_rows(tokens, first_id, table_rows):
    """Return rows of ids of int64, and which of them are inside the table."""
    rows = tokens - first_id  # wraps around for ids far below, which the first condition sorts out
    return rows, (tokens >= first_id) & (rows < table_rows)


@triton.jit
def find_slots(slots_ptr, rows, is_inside):
    """Return where rows lie among the hot ones, -1 for those that don't."""
    return tl.load(slots_ptr + rows, mask=is_inside, other=-1)


@triton.jit
def find_owner(owners_ptr, row, is_inside, position):
    """Return who fetches a row, and whether that is somebody else than the one at this position."""
    owner = tl.load(owners_ptr + row, mask=is_inside, other=0)
    return owner, is_inside & (owner != position)


@triton.jit
def count_row(counts_ptr, row, is_inside):
    """Add 1 to a row's count, in the first of the programs that share the row."""
    tl.atomic_add(counts_ptr + row, 1, mask=is_inside & (tl.program_id(1) == 0), sem="relaxed")
