"""Tables some of whose rows are hot, and what a lookup has to find in them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from packed_tables import decoded

from ftw.kernels.hot import HotRowBuffers


class HotTable(NamedTuple):
    """A table whose hot rows are poison in `table`, so that who reads them there is found out."""

    whole: torch.Tensor
    table: torch.Tensor
    hot: HotRowBuffers


def random_rows(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return rows of random bits: NaNs, infinities, subnormals and minus zeros are among them."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = columns * torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (rows, nbytes), dtype=torch.uint8, generator=generator).view(dtype)


def make_hot(table: torch.Tensor, hot_rows: Sequence[int], *, is_counted: bool = True) -> HotTable:
    """Make some rows hot; their slots are in another order than they, and one slot is nobody's."""
    slots = torch.full((table.shape[0],), -1, dtype=torch.int32)
    copies = torch.full((len(hot_rows) + 1, table[:1].nbytes), 0x5A, dtype=torch.uint8)
    poisoned = table.clone()
    for slot, row in enumerate(reversed(hot_rows)):
        slots[row] = slot
        copies[slot] = table[row].view(torch.uint8)
        poisoned.view(torch.uint8)[row] = 0xA5
    counts = torch.zeros(table.shape[0], dtype=torch.int32) if is_counted else None
    return HotTable(table, poisoned, HotRowBuffers(slots, copies.view(table.dtype), counts))


def expected_rows(
    values: torch.Tensor,
    ids: torch.Tensor,
    *,
    first_id: int = 0,
    columns: tuple[int, int] | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Pick rows of what a table holds, one by one, and scale them as torch does."""
    start, length = columns if columns is not None else (0, values.shape[1])
    found = torch.zeros(ids.numel(), length * values.element_size(), dtype=torch.uint8).view(values.dtype)
    for position, token in enumerate(ids.reshape(-1).tolist()):
        if 0 <= token - first_id < values.shape[0]:
            row = values[token - first_id, start : start + length]
            row = row if scale is None else row * torch.tensor(scale, dtype=row.dtype)
            found.view(torch.uint8)[position] = row.contiguous().view(torch.uint8)
    return found.reshape(*ids.shape, length)


def expected_counts(num_rows: int, ids: torch.Tensor, first_id: int = 0) -> list[int]:
    """Count how often each row is asked for."""
    rows = [token - first_id for token in ids.reshape(-1).tolist()]
    return [rows.count(row) for row in range(num_rows)]


def values_of(table: torch.Tensor, ggml_type: str | None, dtype: torch.dtype) -> torch.Tensor:
    """Return the values that a table stands for."""
    return table if ggml_type is None else decoded(table, ggml_type).to(dtype)


def assert_same(found: torch.Tensor, wanted: torch.Tensor, *, is_exact: bool = True) -> None:
    """Compare bits; where values were computed, which NaN a NaN is may differ."""
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    if is_exact:
        assert torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))
        return
    bits = {2: torch.int16, 4: torch.int32}[found.element_size()]
    is_same = (found.view(bits) == wanted.view(bits)) | (found.isnan() & wanted.isnan())
    assert is_same.all(), (found[~is_same], wanted[~is_same])
