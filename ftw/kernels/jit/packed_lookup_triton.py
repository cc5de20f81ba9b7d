"""The kernel of `ftw.kernels.packed_lookup`. Grid: (ids, runs of `ELEMENTS` values of one row)."""

from __future__ import annotations

import triton
import triton.language as tl

from ftw.kernels.jit.rounding_triton import rounded, widened
from ftw.kernels.jit.rows_triton import count_row, find_owner, find_rows, find_slots

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

UNITS = {4: tl.int32, 2: tl.int16, 1: tl.uint8}


@triton.jit
def packed_lookup_kernel(
    table_ptr,
    ids_ptr,
    codebook_ptr,
    out_ptr,
    slots_ptr,
    hot_ptr,
    counts_ptr,
    owners_ptr,
    first_id,
    table_rows,
    columns,
    row_nbytes,
    scale,
    zero,
    DECODE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TYPE_SIZE: tl.constexpr,
    ELEMENTS: tl.constexpr,
    IS_STAGED: tl.constexpr,
    UNIT: tl.constexpr,
    UNIT_NBYTES: tl.constexpr,
    UNITS: tl.constexpr,
    LINE_NBYTES: tl.constexpr,
    WARM_WORDS: tl.constexpr,
):
    """Decode one run of one row, or write zeros for an id outside the table.

    table_ptr uint8 [table_rows, row_nbytes], ids_ptr [programs of axis 0], out_ptr [programs of axis 0, columns].
    first_id, not negative, is the id of the first row. ELEMENTS is a multiple of BLOCK_SIZE. With IS_STAGED the run's
    packed bytes are fetched first, in units of the type UNIT, and lie in its own place in the output, where they always
    fit, until its values are ready. What is None is compiled out:

    slots_ptr    int32 [table_rows]: rows whose slot is not negative are decoded from hot_ptr [slots, row_nbytes]
    counts_ptr   int32 [table_rows]: the row's count goes up by 1
    owners_ptr   int32 [table_rows]: a row is fetched at the position that owns it, and not written at the others
    scale        what values are multiplied by once they are rounded

    Of a part of each row, table_ptr and hot_ptr point at its start in the first row.
    """
    position = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * ELEMENTS
    token = tl.load(ids_ptr + position).to(tl.int64)
    row, is_inside = find_rows(token, first_id, table_rows)
    # A row outside is never touched; in its stead the first one is decoded, and the values dropped.
    offset = start // BLOCK_SIZE * TYPE_SIZE
    packed = table_ptr + tl.where(is_inside, row, 0) * row_nbytes + offset
    out = out_ptr + position * columns + start
    count = tl.minimum(columns - start, ELEMENTS)
    written = count
    is_read = is_inside
    if slots_ptr is not None:
        slot = find_slots(slots_ptr, row, is_inside)
        is_hot = slot >= 0
        is_read = is_inside & (slot < 0)
        hot = hot_ptr + slot.to(tl.int64) * row_nbytes + offset
        if not IS_STAGED:
            packed = tl.where(is_hot, hot, packed)
    if owners_ptr is not None:
        _, is_other = find_owner(owners_ptr, row, is_inside, position)
        is_read = is_read & (is_other == 0)
        written = tl.where(is_other, 0, count)
    if IS_STAGED:
        source = packed.to(tl.pointer_type(UNIT), bitcast=True)
        # Lanes begin at a line of the cache: a load that spans two lines would be two requests on the link.
        before = (source.to(tl.int64) % LINE_NBYTES).to(tl.int32) // UNIT_NBYTES
        units = tl.arange(0, UNITS) - before
        readable_units = tl.where(is_read, count // BLOCK_SIZE * TYPE_SIZE // UNIT_NBYTES, 0)
        is_readable = (units >= 0) & (units < readable_units)
        fetched = tl.load(source + units, mask=is_readable, other=0)
        if WARM_WORDS > 0:
            # While the link is waited for, the codebook, or as much of it as the lanes reach, is brought near: a word
            # out of each sector of 32 bytes. The compiler must not know that `zero` is zero, or it drops the loads.
            sectors = tl.arange(0, UNITS) * 8
            words = codebook_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
            near = tl.load(words + sectors, mask=sectors < WARM_WORDS, other=0)
            fetched = fetched | (near & zero).to(fetched.dtype)
        packed = out.to(tl.pointer_type(table_ptr.dtype.element_ty), bitcast=True)
        tl.store(out.to(tl.pointer_type(UNIT), bitcast=True) + units, fetched, mask=is_readable)
        if slots_ptr is not None:
            packed = tl.where(is_hot, hot, packed)  # nothing to wait for: it is near
        tl.debug_barrier()  # every thread reads what others have stored
    if counts_ptr is not None:
        count_row(counts_ptr, row, is_inside)
    octets = tl.arange(0, ELEMENTS // 8)
    octet = tl.where(octets * 8 < count, octets, 0)
    block = packed + octet // (BLOCK_SIZE // 8) * TYPE_SIZE
    values = _decode_octets(block, octet % (BLOCK_SIZE // 8), codebook_ptr, DECODE)
    if scale is not None:
        values = widened(rounded(values, out_ptr.dtype.element_ty)) * scale
    values = tl.where(is_inside, values, 0.0)
    if IS_STAGED:
        tl.debug_barrier()  # every thread has read before any writes over it
    elements = octets[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(out + elements, rounded(values, out_ptr.dtype.element_ty), mask=elements < written)


@triton.jit
def _decode_octets(block, octet, codebook, DECODE: tl.constexpr):
    """Decode eight values of each octet; each join puts values of one octet side by side, in the same thread."""
    multiples_of_four = tl.join(DECODE(block, octet, 0, codebook), DECODE(block, octet, 4, codebook))
    other_even = tl.join(DECODE(block, octet, 2, codebook), DECODE(block, octet, 6, codebook))
    one_and_five = tl.join(DECODE(block, octet, 1, codebook), DECODE(block, octet, 5, codebook))
    other_odd = tl.join(DECODE(block, octet, 3, codebook), DECODE(block, octet, 7, codebook))
    values = tl.join(tl.join(multiples_of_four, other_even), tl.join(one_and_five, other_odd))
    return tl.reshape(values, [octet.shape[0], 8])
