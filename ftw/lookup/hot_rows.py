"""HotRows: the rows of a table that are used most, kept in device memory, where lookups read them instead.

    slots       int32 [rows]            where a row lies in `hot`, -1 for a cold one
    hot         [num_slots, columns]    the rows themselves, as the table has them; packed ones stay packed
    counts      int32 [rows]            how often lookups have read a row; they count on the device
    residents   int64 [num_slots]       which row lies in a slot, -1 for an empty one

All of it is allocated once and never moves, so a captured graph sees each new set. The set changes on the current
stream, in an order that is right for every lookup before and after: the slots of leaving rows become -1, the arriving
rows are fetched into their places, and only then do their slots name them. Nothing depends on a number that the host
would have to wait for: every step works on all slots, with masks.

A CPU has no such order of its threads, nor memory that is faster than the table's: its lookups only count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ftw.errors import LookupArgumentError, printable
from ftw.kernels import HotRowBuffers
from ftw.kernels.lookup import lookup
from ftw.pinned import resolve_device
from ftw.sizes import parse_nbytes, whole_number

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_COUNT = (1 << 30) - 1  # twice that and one more is the greatest int32
_INT32_MAX = torch.iinfo(torch.int32).max
_INTEGERS = (torch.int32, torch.int64)


class HotRows:
    """The hot rows of one table.

    Attributes:
        device: Where they are; lookups on other devices read the table alone.
        hot: What the kernels take.
    """

    def __init__(self, name: str, table: torch.Tensor, num_slots: int, device: torch.device) -> None:
        """Allocate `num_slots` empty slots on the device; between 1 and the table's rows.

        Device memory: that many rows, 8 bytes for each row of the table, and 8 bytes for each slot.
        """
        self.name = name
        self.device = device
        self._table = table
        num_rows = table.shape[0]
        # One entry more than there are rows and slots: what is masked out is written there, and never read.
        self._slots = torch.full((num_rows + 1,), -1, dtype=torch.int32, device=device)
        self._residents = torch.full((num_slots + 1,), -1, dtype=torch.int64, device=device)
        self._counts = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.hot = HotRowBuffers(
            slots=self._slots[:num_rows],
            rows=torch.zeros(num_slots, table.shape[1], dtype=table.dtype, device=device),
            counts=self._counts,
        )

    @property
    def num_slots(self) -> int:
        """How many rows fit."""
        return int(self.hot.rows.shape[0])

    def set(self, row_numbers: torch.Tensor) -> None:
        """Make exactly these rows the hot ones: distinct int64 numbers on the CPU, at most `num_slots`."""
        wanted = torch.zeros(self.num_slots, dtype=torch.int64, device="cpu")
        wanted[: row_numbers.numel()] = row_numbers
        is_wanted = torch.arange(self.num_slots, device="cpu") < row_numbers.numel()
        self._change(wanted.to(self.device), is_wanted.to(self.device))

    def update(self) -> None:
        """Make the rows counted most often the hot ones, then halve all counts.

        Of rows with equal counts those that are hot already stay, a hot row leaves only for another one, and a row that
        was never counted does not come in. A count that has gone beyond int32 is one from 2^31 on.
        """
        counts = self._counts
        score = torch.where(counts >= 0, counts, _MAX_COUNT).clamp_(max=_MAX_COUNT)
        score.mul_(2).add_(self.hot.slots >= 0)
        scores, row_numbers = torch.topk(score, self.num_slots)
        del score
        self._change(row_numbers, scores > 0)
        counts.bitwise_right_shift_(1).bitwise_and_(_INT32_MAX)

    def warm_up(self) -> None:
        """Run the kernel that fetches rows once, which changes none."""
        self._fetch(self._residents[:-1])

    def count(self, ids: torch.Tensor, first_id: int) -> None:
        """Add 1 for each of these ids, of which `first_id` is the first row's; where no kernel does."""
        numbers = ids.reshape(-1).to(torch.int64)
        numbers = numbers[(numbers >= first_id) & (numbers - first_id < self._counts.shape[0])] - first_id
        self._counts.index_add_(0, numbers, torch.ones_like(numbers, dtype=torch.int32))

    def row_numbers(self) -> torch.Tensor:
        """Return the numbers of the hot rows, in order, on the CPU; waits for the device."""
        residents = self._residents[:-1].cpu()
        return residents[residents >= 0].sort().values

    def synchronize(self) -> None:
        """Wait until the device reads them no more."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _change(self, wanted: torch.Tensor, is_wanted: torch.Tensor) -> None:
        """Make `wanted` rows the hot ones, where `is_wanted`; both `[num_slots]`, on the device."""
        no_row, no_slot = self.hot.slots.shape[0], self.num_slots
        residents = self._residents[:-1]
        slots = self.hot.slots[wanted].long()
        is_arriving = is_wanted & (slots < 0)
        is_free = torch.ones_like(self._residents, dtype=torch.bool)
        is_free.index_fill_(0, torch.where(is_wanted & (slots >= 0), slots, no_slot), False)
        is_free = is_free[:-1]
        # The slots that are free begin the one order, the arriving rows the other; there are never fewer of the former.
        places = is_free.logical_not().byte().argsort(stable=True)
        order = is_arriving.logical_not().byte().argsort(stable=True)
        arrivals, is_arrival = wanted[order], is_arriving[order]

        self._slots.index_fill_(0, torch.where(is_free & (residents >= 0), residents, no_row), -1)
        residents.masked_fill_(is_free, -1)
        self._residents.index_copy_(0, torch.where(is_arrival, places, no_slot), arrivals)
        self._fetch(residents)
        self._slots.index_copy_(0, torch.where(is_arrival, arrivals, no_row), places.int())

    def _fetch(self, residents: torch.Tensor) -> None:
        """Fill every slot with its row, in one launch and without other memory.

        On a device, rows that stay are read from their own slots and written back there, each element by the thread
        that has read it, so the link carries the arriving ones alone. The reference takes every row from the table.
        """
        hot = self.hot._replace(counts=None) if residents.is_cuda else None
        lookup(self._table, residents, hot=hot, out=self.hot.rows)


def count_slots(name: str, table: torch.Tensor, hot_rows: int | None, hot_bytes: int | str | None) -> int | None:
    """Return how many rows have room in `hot_rows` or `hot_bytes`; None where the one that is given asks for nothing.

    Raises:
        LookupArgumentError: Both are given, or one is no number or size, or the table is on a device itself.
    """
    subject = printable(name)
    if hot_rows is not None and hot_bytes is not None:
        raise LookupArgumentError(f"{subject}: hot_rows: found together with hot_bytes, one of them is needed")
    asked = parse_nbytes(f"{subject}: hot_bytes", hot_bytes, LookupArgumentError)
    slot_nbytes = max(table.shape[1] * table.element_size(), 1)
    if hot_rows is not None:
        asked, slot_nbytes = whole_number(hot_rows), 1
        if asked is None or asked < 0:
            raise LookupArgumentError(f"{subject}: hot_rows: found {hot_rows!r}, a number from 0 on is needed")
    if not asked:
        return None
    if table.device.type != "cpu":
        raise LookupArgumentError(f"{subject}: hot rows: found a table on {table.device}, one in host memory is needed")
    return min(asked // slot_nbytes, table.shape[0]) if table.shape[1] else 0


def make_hot_rows(name: str, table: torch.Tensor, num_slots: int, device: torch.device | str | None) -> HotRows:
    """Return room for `num_slots` rows, at least 1, on `device`.

    None is the current GPU where the table is page-locked, else the CPU.

    Raises:
        DeviceError: torch has no such device.
    """
    if device is None and not (torch.cuda.is_available() and table.is_pinned()):
        device = "cpu"
    with torch.inference_mode(mode=False):  # what is made in it could only be changed in it
        return HotRows(name, table, num_slots, resolve_device(device))


def check_hot_ids(
    name: str, ids: torch.Tensor | Sequence[int], first_id: int, rows: int, num_slots: int
) -> torch.Tensor:
    """Return the row numbers of ids that shall be hot: int64, on the CPU.

    Raises:
        LookupArgumentError: They are no list of distinct ids of the table's rows, or more than there are slots.
    """
    subject = f"{printable(name)}: hot rows"
    try:
        found = torch.as_tensor(ids, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise LookupArgumentError(f"{subject}: found a {type(ids).__name__}, a list of ids is needed") from error
    if found.ndim != 1 or (found.numel() and found.dtype not in _INTEGERS):
        raise LookupArgumentError(f"{subject}: found {found.dtype} {list(found.shape)}, a list of ids is needed")
    if found.numel() > num_slots:
        raise LookupArgumentError(f"{subject}: found {found.numel()} ids, there is room for {num_slots}")
    numbers = found.to(torch.int64)
    is_outside = (numbers < first_id) | (numbers - first_id >= rows)
    if is_outside.any():
        first = int(numbers[is_outside][0])
        raise LookupArgumentError(f"{subject}: found id {first}, allowed are {first_id} to {first_id + rows - 1}")
    if numbers.unique().numel() < numbers.numel():
        raise LookupArgumentError(f"{subject}: found an id twice, distinct ids are needed")
    return numbers - first_id
