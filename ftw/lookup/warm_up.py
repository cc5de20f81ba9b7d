"""Warm-up: lookups that make Triton compile all kernels that later ones may need, before anybody waits for them.

What Triton compiles apart for one table, and what therefore has to be tried:

    dtype of the ids               int32, int64
    address of the ids             a multiple of 16 or not
    number of ids                  few or many (packed rows), elected or not; elected ones a multiple of 16 or not
    columns                        a whole row, or a slice of it, which begins at a multiple of 16 bytes or not

The ids are all outside of the table: such a lookup runs the same kernels, and reads and counts nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ftw.errors import LookupArgumentError, printable
from ftw.sizes import whole_number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ftw.lookup.row_format import RowFormat
    from ftw.lookup.table_storage import TableStorage

INDEX_DTYPES = (torch.int32, torch.int64)
_ALIGNMENT = 16  # Triton compiles addresses and integers that are multiples of it apart
_OUTSIDE = -1  # an id of no table


class TrialIds(NamedTuple):
    """Ids to be looked up: `num_ids` of a dtype, that begin `offset` elements behind an aligned address."""

    dtype: torch.dtype
    offset: int
    num_ids: int

    def make(self, device: torch.device) -> torch.Tensor:
        """Return them."""
        return torch.full((self.offset + self.num_ids,), _OUTSIDE, dtype=self.dtype, device=device)[self.offset :]


def warm_up_lookups(
    storage: TableStorage, row_format: RowFormat, max_ids: int, dtypes: Sequence[torch.dtype], device: torch.device
) -> None:
    """Run what has to be compiled for a table; the arguments are those of `HostEmbedding.warm_up`."""
    trials = plan_trials(storage.name, max_ids, dtypes)
    if device.type == "cpu":
        return
    table = storage.table
    row_nbytes = table.shape[1] * table.element_size()
    with torch.cuda.device(device):
        for trial in trials:
            ids = trial.make(device)
            for columns in _iter_columns(storage.name, row_format, row_nbytes):
                storage.look_up(ids, columns)
        if storage.hot_rows is not None and storage.hot_rows.device == device:
            storage.hot_rows.warm_up()


def plan_trials(name: str, max_ids: int, dtypes: Sequence[torch.dtype]) -> list[TrialIds]:
    """Return the ids to be looked up.

    Raises:
        LookupArgumentError: `max_ids` is no number from 1 on, or one of `dtypes` is not int32 or int64.
    """
    subject = printable(name)
    most = whole_number(max_ids)
    if most is None or most < 1:
        raise LookupArgumentError(f"{subject}: max_ids: found {max_ids!r}, a number from 1 on is needed")
    for dtype in dtypes:
        if dtype not in INDEX_DTYPES:
            raise LookupArgumentError(f"{subject}: dtypes: found {dtype}, torch.int32 and torch.int64 are allowed")
    counts = _counts(most)
    return [TrialIds(dtype, offset, count) for dtype in dtypes for offset in (0, 1) for count in counts]


def _counts(most: int) -> list[int]:
    """Return numbers of ids: one of each magnitude, and of the largest ones a multiple of 16 and another."""
    whole = most - most % _ALIGNMENT
    powers = (1 << bits for bits in range(most.bit_length()))
    return sorted({count for count in (*powers, most, most - 1, whole, whole - 1) if 0 < count <= most})


def _iter_columns(name: str, row_format: RowFormat, row_nbytes: int) -> Iterator[tuple[int, int] | None]:
    """Yield the parts of a row that are looked up: all of it, and a slice of each alignment."""
    yield None
    by_alignment: dict[int, int] = {}
    for layer in range(row_format.num_slices or 0):
        by_alignment.setdefault(layer * row_nbytes // (row_format.num_slices or 1) % _ALIGNMENT, layer)
    for layer in by_alignment.values():
        yield row_format.columns_of(name, layer)
