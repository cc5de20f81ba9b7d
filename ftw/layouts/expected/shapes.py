"""Shapes: what a text of a family's row says of a name, and the shape that each tensor of a module then has.

Of a module of [rows, columns] elements, by the type of its weight:

    BF16, F16, F32    weight [rows, columns]
    U8 (NVFP4)        weight [rows, columns/2]    weight_scale [rows, columns/16]    weight_global [rows]
    F8_E4M3           weight [rows, columns]      one of
                          weight_scale [rows]                               a scale for each row
                          weight_scale_inv [rows, columns/32], U8           MXFP8
                          weight_scale_inv [rows/block, columns/block]      blocks
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftw.layouts.expected.sizes import Size, Sizes

FLOATS = frozenset({"BF16", "F16", "F32", "F64"})
INTEGERS = frozenset({"I64", "I32", "I16", "I8", "U8"})
_ANY = FLOATS | INTEGERS | {"F8_E4M3", "F8_E8M0"}
_DTYPES = {"int": INTEGERS, "any": _ANY}


class Word(NamedTuple):
    """A name in a text of a row.

    Attributes:
        name: The name of a tensor or a module.
        is_needed: Whether it must be there.
        is_module: Whether it is a module.
        has_bias: Whether the module has a bias.
        dtypes: Types that a tensor may have which is asked for by itself.
        axes: The expressions of its shape.
    """

    name: str
    is_needed: bool
    is_module: bool
    has_bias: bool
    dtypes: frozenset[str]
    axes: tuple[str, ...]


@lru_cache(maxsize=1024)
def _parse(text: str) -> tuple[Word, ...]:
    return tuple(map(_parse_word, text.split()))


def _parse_word(text: str) -> Word:
    marked, _, shape = text.partition("=")
    kind, _, axes = shape.rpartition(":")
    name = marked.removesuffix("?")
    bare = name.removesuffix("+").removesuffix(".")
    dtypes = _DTYPES.get(kind, FLOATS)
    return Word(bare, name == marked, bare != name, name.endswith("+"), dtypes, tuple(filter(None, axes.split(","))))


def iter_words(text: str) -> Iterator[Word]:
    """Yield what a text of a row asks for."""
    yield from _parse(text)


class Shape:
    """The shape of a module's weight in elements, as expressions of sizes."""

    def __init__(self, axes: tuple[str, ...], sizes: Sizes) -> None:
        self._axes = axes
        self._sizes = sizes
        self._found: list[Size | None] = [None if axis == "*" else sizes.find(axis) for axis in axes]

    @property
    def values(self) -> tuple[int | None, ...]:
        """The axes, None where one is not known."""
        return tuple(None if size is None else size.value for size in self._found)

    def parts(self) -> list[Shape]:
        """Return the shapes of the parts that the first axis is the sum of."""
        terms = self._axes[0].split("+") if self._axes else []
        return [Shape((term, *self._axes[1:]), self._sizes) for term in terms]

    def describe(self) -> str:
        """Return which keys say so, for a message; empty if none does."""
        keys = {key: value for size in self._found if size is not None for key, value in size.keys.items()}
        said = ", ".join(f"{key} {value}" for key, value in keys.items())
        return f" by {said} of {self._sizes.file}" if said else ""


class Module(NamedTuple):
    """How a module is stored.

    Attributes:
        shape: Its weight's shape.
        dtype: The type of its weight.
        scale: The name of its scale, empty if it has none or that is not looked at.
        scale_dtype: The type of the scale.
        block: Rows and columns of a block that a scale is for, where config.json says so.
    """

    shape: Shape
    dtype: str = ""
    scale: str = ""
    scale_dtype: str = ""
    block: int = 1

    def scaled_block(self) -> tuple[int, int]:
        """Return how many rows and columns share a scale; 0 columns are all."""
        if self.dtype == "U8":
            return (1, 16)
        if self.scale == "weight_scale_inv":
            return (1, 32) if self.scale_dtype == "U8" else (self.block, self.block)
        return (1, 0)

    def expect(self, role: str) -> tuple[int | None, ...]:
        """Return the shape of one of its tensors, with None for an axis that is not known."""
        axes = self.shape.values
        high, wide = self.scaled_block()
        if role == "input_scale":
            return ()
        if role in ("bias", "weight_global") or (role == self.scale and not wide):
            return axes[:1]
        if role == self.scale:
            return (_divided(axes[0], high), _divided(axes[-1], wide))
        return (*axes[:-1], _divided(axes[-1], 2)) if role == "weight" and self.dtype == "U8" else axes

    def find_unfit(self) -> str | None:
        """Return why its scales do not fit its size, None if they do."""
        high, wide = self.scaled_block()
        rows = [part.values[0] for part in self.shape.parts()] if self.scale and wide else []
        columns = self.shape.values[-1] if rows else None
        if all((size or 0) % high == 0 for size in rows) and (columns or 0) % max(wide, 1) == 0:
            return None
        found = f"has parts of {' and '.join(map(str, rows))} rows and {columns} columns"
        return f"{found}, multiples of {high} and {wide} are needed: that is{self.shape.describe()}"


def _divided(size: int | None, number: int) -> int | None:
    return None if size is None else size // number
