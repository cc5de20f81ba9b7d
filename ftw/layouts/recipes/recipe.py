"""Recipes: how the bytes of a tensor are made of those of the source, so that any range of them can be made by itself.

    Run          bytes of a stored tensor, as they are
    Zeros        nothing but zeros
    Cast         elements of another type
    PaddedRows   rows, each filled up with zeros
    Swapped      a matrix [rows, columns] as [columns, rows]
    Filled       one number, again and again
    Made         a few bytes that a function makes of whole tensors
    Given        bytes that are no tensor's, such as a header
    Dequantized  FP8 rows times their scales (`ftw.layouts.recipes.dequantized`)
    Joined       recipes one after another

A recipe says how many bytes it makes and of which tensors. None keeps anything, and none takes more memory than
`STEP_NBYTES` several times over, however large the tensors are.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

from ftw.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeAlias

    import numpy as np
    from numpy.typing import NDArray

    Bytes: TypeAlias = NDArray[np.uint8]
    Read: TypeAlias = Callable[[str, memoryview, int], None]  # fills a view with a stored tensor's bytes from an offset

STEP_NBYTES = 1 << 20  # 4 MiB took 1.3 times as long, out of the processor's cache (2 cores, 2026-12-01)


class Recipe(Protocol):
    """How some bytes of a tensor are made."""

    @property
    def nbytes(self) -> int:
        """How many they are."""

    def iter_sources(self) -> Iterator[str]:
        """Yield the names of the stored tensors that they are made of; a name may come again."""

    def read_into(self, view: memoryview, offset: int, read: Read) -> None:
        """Make those that begin at byte `offset`, as many as fill the view."""


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes of a stored tensor, from `offset` on, as they are."""

    name: str
    offset: int
    nbytes: int

    def iter_sources(self) -> Iterator[str]:
        """Yield the tensor's name."""
        yield self.name

    def read_into(self, view: memoryview, offset: int, read: Read) -> None:
        """Read them."""
        read(self.name, view, self.offset + offset)


@dataclass(frozen=True, slots=True)
class Zeros:
    """So many zeros."""

    nbytes: int

    def iter_sources(self) -> Iterator[str]:
        """Yield nothing."""
        yield from ()

    def read_into(self, view: memoryview, offset: int, read: Read) -> None:  # noqa: ARG002
        """Write them."""
        view[:] = bytes(len(view))


@dataclass(frozen=True, slots=True)
class Given:
    """These bytes."""

    content: bytes

    @property
    def nbytes(self) -> int:
        """How many they are."""
        return len(self.content)

    def iter_sources(self) -> Iterator[str]:
        """Yield nothing."""
        yield from ()

    def read_into(self, view: memoryview, offset: int, read: Read) -> None:  # noqa: ARG002
        """Copy them."""
        view[:] = self.content[offset : offset + len(view)]


@dataclass(frozen=True, slots=True)
class Cast:
    """The elements of a recipe in another type."""

    inner: Recipe
    before: str
    after: str

    @property
    def nbytes(self) -> int:
        """Bytes in the new type."""
        return self.inner.nbytes // _width(self.before) * _width(self.after)

    def iter_sources(self) -> Iterator[str]:
        """Yield those of what is cast."""
        return self.inner.iter_sources()

    def read_into(self, view: memoryview, offset: int, read: Read) -> None:
        """Read elements, cast them."""
        from ftw.layouts.recipes.casts import cast

        old, new = _width(self.before), _width(self.after)
        for start, stop in _steps(offset, offset + len(view), STEP_NBYTES):
            first, last = start // new, -(-stop // new)
            stored = read_bytes(self.inner, first * old, (last - first) * old, read)
            made = cast(stored, self.before, self.after)
            view[start - offset : stop - offset] = made[start - first * new : stop - first * new].data


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Rows of `row_nbytes`, each filled up with zeros to `padded_nbytes`."""

    inner: Recipe
    row_nbytes: int
    padded_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes with the zeros."""
        return self.inner.nbytes // self.row_nbytes * self.padded_nbytes

    def iter_sources(self) -> Iterator[str]:
        """Yield those of what is padded."""
        return self.inner.iter_sources()

    def read_into(self, view: memoryview, offset: int, read: Read) -> None:
        """Read rows, spread them."""
        import numpy as np

        for start, stop in _steps(offset, offset + len(view), STEP_NBYTES):
            first, last = start // self.padded_nbytes, -(-stop // self.padded_nbytes)
            rows = np.zeros((last - first, self.padded_nbytes), np.uint8)
            stored = read_bytes(self.inner, first * self.row_nbytes, (last - first) * self.row_nbytes, read)
            rows[:, : self.row_nbytes] = stored.reshape(last - first, self.row_nbytes)
            made = rows.reshape(-1)
            begin = first * self.padded_nbytes
            view[start - offset : stop - offset] = made[start - begin : stop - begin].data


@dataclass(frozen=True, slots=True)
class Swapped:
    """A matrix `[rows, columns]` of elements of `width` bytes, 1, 2, 4 or 8, as `[columns, rows]`."""

    inner: Recipe
    rows: int
    columns: int
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self.inner.nbytes

    def iter_sources(self) -> Iterator[str]:
        """Yield those of the matrix."""
        return self.inner.iter_sources()

    def read_into(self, view: memoryview, offset: int, read: Read) -> None:
        """Read the matrix in bands of rows, of which the columns that are wanted are kept.

        Where the view is shorter than the matrix, all of that is read for each view: from the page cache, as a rule.
        """
        import numpy as np

        made_nbytes, stored_nbytes = self.rows * self.width, self.columns * self.width
        first, last = offset // made_nbytes, -(-(offset + len(view)) // made_nbytes)
        band = max(STEP_NBYTES // stored_nbytes, 1)
        made = np.empty((last - first, self.rows), f"u{self.width}")
        for start in range(0, self.rows, band):
            stop = min(start + band, self.rows)
            stored = read_bytes(self.inner, start * stored_nbytes, (stop - start) * stored_nbytes, read)
            made[:, start:stop] = stored.view(made.dtype).reshape(stop - start, self.columns)[:, first:last].T
        begin = offset - first * made_nbytes
        view[:] = made.view(np.uint8).reshape(-1)[begin : begin + len(view)].data


@dataclass(frozen=True, slots=True)
class Filled:
    """One stored number, `count` times, as F32; or one divided by it."""

    inner: Recipe
    dtype: str
    count: int
    is_inverse: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return 4 * self.count

    def iter_sources(self) -> Iterator[str]:
        """Yield the number's."""
        return self.inner.iter_sources()

    def read_into(self, view: memoryview, offset: int, read: Read) -> None:
        """Read it, write it."""
        import numpy as np

        from ftw.layouts.recipes.casts import from_floats, to_floats

        number = to_floats(read_bytes(self.inner, 0, self.inner.nbytes, read), self.dtype)
        made = from_floats(np.float32(1) / number if self.is_inverse else number, "F32")
        view[:] = np.resize(np.roll(made, -(offset % 4)), len(view)).data


@dataclass(frozen=True, slots=True)
class Made:
    """A few bytes that a function makes of whole recipes."""

    inner: tuple[Recipe, ...]
    nbytes: int
    make: Callable[[list[Bytes]], Bytes]

    def iter_sources(self) -> Iterator[str]:
        """Yield those of all recipes."""
        for recipe in self.inner:
            yield from recipe.iter_sources()

    def read_into(self, view: memoryview, offset: int, read: Read) -> None:
        """Make all, and keep what is wanted."""
        made = self.make([read_bytes(recipe, 0, recipe.nbytes, read) for recipe in self.inner])
        view[:] = made[offset : offset + len(view)].data


@dataclass(frozen=True, slots=True)
class Joined:
    """Recipes one after another."""

    parts: tuple[Recipe, ...]
    _ends: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ends", tuple(accumulate(part.nbytes for part in self.parts)))

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return self._ends[-1] if self._ends else 0

    def iter_sources(self) -> Iterator[str]:
        """Yield those of each."""
        for part in self.parts:
            yield from part.iter_sources()

    def read_into(self, view: memoryview, offset: int, read: Read) -> None:
        """Make each part that the view reaches into."""
        for part, start, stop, place in self.iter_parts(offset, len(view)):
            part.read_into(view[place : place + stop - start], start, read)

    def iter_parts(self, offset: int, nbytes: int) -> Iterator[tuple[Recipe, int, int, int]]:
        """Yield each part of a range: its recipe, where the range begins and ends there, and its place in the range."""
        number, end = bisect_right(self._ends, offset), offset + nbytes
        begin = self._ends[number - 1] if number else 0
        while begin < end and number < len(self.parts):
            low, high = max(begin, offset), min(self._ends[number], end)
            if low < high:
                yield self.parts[number], low - begin, high - begin, low - offset
            begin, number = self._ends[number], number + 1


def join(parts: Sequence[Recipe]) -> Recipe:
    """Return recipes one after another as one; runs that follow each other in a tensor become one run."""
    merged: list[Recipe] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, Run) and isinstance(last, Run) and _follows(part, last):
            merged[-1] = Run(last.name, last.offset, last.nbytes + part.nbytes)
        else:
            merged.append(part)
    return merged[0] if len(merged) == 1 else Joined(tuple(merged))


def _follows(part: Run, last: Run) -> bool:
    return part.name == last.name and part.offset == last.offset + last.nbytes


def find_run(recipe: Recipe, offset: int, nbytes: int) -> Run | None:
    """Return the stored bytes that a range is, if it is made of nothing else and they lie together."""
    if isinstance(recipe, Joined):
        parts = list(recipe.iter_parts(offset, nbytes))
        if len(parts) != 1:
            return None
        recipe, offset = parts[0][0], parts[0][1]
        return find_run(recipe, offset, nbytes)
    return Run(recipe.name, recipe.offset + offset, nbytes) if isinstance(recipe, Run) else None


def _width(dtype: str) -> int:
    return DTYPES[dtype].bits // 8


def _steps(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    while start < stop:
        end = min(start + step, stop)
        yield start, end
        start = end


def read_bytes(recipe: Recipe, offset: int, nbytes: int, read: Read) -> Bytes:
    """Return bytes of a recipe, from its byte `offset` on."""
    import numpy as np

    stored = np.empty(nbytes, np.uint8)
    if nbytes:
        recipe.read_into(stored.data, offset, read)
    return stored
