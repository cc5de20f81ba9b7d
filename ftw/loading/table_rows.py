"""Table rows: which rows of a lookup table a process holds, and where they lie in the checkpoint.

    rank        0                     1                     …    size - 1
    rows        ceil(rows / size)     ceil(rows / size)     …    floor(rows / size)     in the order of their ids

The first `rows % size` ranks of a group hold one row more than the others, so of more ranks than rows the last hold
none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftw.checkpoint import PER_LAYER_EMBEDDING, TOKEN_EMBEDDING
from ftw.ggml_types import PACKED_TYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftw.checkpoint import Checkpoint
    from ftw.tensors import TensorInfo
    from ftw.verdict import TableVerdict

_BY_TOKEN = frozenset({TOKEN_EMBEDDING, PER_LAYER_EMBEDDING})  # roles whose ids are those of tokens


class TableRows:
    """Rows of a table that follow each other, in one tensor or in several that are its parts.

    Attributes:
        table: The table.
        rows: `(start, length)`; None for all, with the padding that may follow them.
        tensors: Those of the table.
        nbytes: Bytes of the rows.
        as_one: A tensor that has these rows alone.
    """

    def __init__(self, checkpoint: Checkpoint, table: TableVerdict, rows: tuple[int, int] | None = None) -> None:
        self.table = table
        self.rows = rows
        self.tensors = [checkpoint.tensors[name] for name in table.tensors]
        first = self.tensors[0]
        row_nbytes = first.nbytes // first.shape[0]
        start, length = rows if rows is not None else (0, sum(tensor.shape[0] for tensor in self.tensors))
        self.nbytes = length * row_nbytes
        self._start = start * row_nbytes
        packed = table.dtype if table.dtype in PACKED_TYPES else None
        self.as_one: TensorInfo = first._replace(shape=(length, *first.shape[1:]), ggml_type=packed, nbytes=self.nbytes)

    def iter_cuts(self, view: memoryview) -> Iterator[tuple[TensorInfo, memoryview, int]]:
        """Cut memory for the rows into a piece for each tensor that has some, with the byte of it that begins there."""
        place = -self._start  # of a tensor, in bytes from the first row that is wanted
        for tensor in self.tensors:
            low, high = max(place, 0), min(place + tensor.nbytes, self.nbytes)
            if low < high:
                yield tensor, view[low:high], low - place
            place += tensor.nbytes


def rank_range(table: TableVerdict, rank: int, size: int) -> tuple[int, int]:
    """Return `(start, length)` of the rows that a rank of a group holds; see the module's table."""
    length, longer = divmod(count_rows(table), size)
    return rank * length + min(rank, longer), length + (rank < longer)


def token_range(table: TableVerdict, vocab_range: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return `(start, length)` of a table's rows for a range of token ids, of which it may have fewer.

    None for the whole table: no range is wanted, or its ids are not those of tokens, as an n-gram table's.
    """
    if vocab_range is None or table.role not in _BY_TOKEN:
        return None
    start, length = vocab_range
    return start, max(min(length, count_rows(table) - start), 0)


def check_vocab_range(table: TableVerdict, vocab_range: tuple[int, int]) -> None:
    """Check a range of token ids against the token embedding.

    Raises:
        ValueError: It is not `(start, length)` of rows that the table has.
    """
    is_pair = isinstance(vocab_range, (tuple, list)) and len(vocab_range) == 2
    is_range = is_pair and all(type(number) is int and number >= 0 for number in vocab_range)
    if is_range and (table.rows is None or sum(vocab_range) <= table.rows):
        return
    allowed = f"(start, length) within the {count_rows(table)} rows of {table.name}, or None, is needed"
    raise ValueError(f"vocab_range is {vocab_range!r}, {allowed}")


def count_rows(table: TableVerdict) -> int:
    """Return the rows of a table without padding; 0 of one whose encoding hides them, which no lookup reads."""
    return table.rows or 0
