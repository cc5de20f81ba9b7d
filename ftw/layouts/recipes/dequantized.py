"""Dequantized: F8_E4M3 rows times their scales, as bf16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftw.dtypes import DTYPES
from ftw.layouts.recipes.recipe import STEP_NBYTES, read_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftw.layouts.recipes.recipe import Read, Recipe

_BF16_NBYTES = 2


@dataclass(frozen=True, slots=True)
class Dequantized:
    """F8_E4M3 elements `[rows, columns]`, each times the scale of its block, in float32, then rounded to bf16.

    Attributes:
        weight: The elements.
        scale: Those of the blocks, `[rows / block_rows, columns / block_columns]`, both rounded up.
        scale_dtype: Their type.
        columns: Elements of a row; a row is made at a time at least.
        block: Rows and columns of a block.
    """

    weight: Recipe
    scale: Recipe
    scale_dtype: str
    columns: int
    block: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of the bf16 elements."""
        return self.weight.nbytes * _BF16_NBYTES

    def iter_sources(self) -> Iterator[str]:
        """Yield those of the elements and of the scales."""
        yield from self.weight.iter_sources()
        yield from self.scale.iter_sources()

    def read_into(self, view: memoryview, offset: int, read: Read) -> None:
        """Read rows and the scales of their blocks, multiply them."""
        import numpy as np

        from ftw.layouts.recipes.casts import from_floats, to_floats

        block_rows, block_columns = self.block
        row_nbytes = self.columns * _BF16_NBYTES
        scales_of_row = -(-self.columns // block_columns)
        row_of_scales = scales_of_row * (DTYPES[self.scale_dtype].bits // 8)
        for start in range(offset, offset + len(view), STEP_NBYTES):
            stop = min(start + STEP_NBYTES, offset + len(view))
            first, last = start // row_nbytes, -(-stop // row_nbytes)
            weights = read_bytes(self.weight, first * self.columns, (last - first) * self.columns, read)
            low, high = first // block_rows, -(-last // block_rows)
            stored = read_bytes(self.scale, low * row_of_scales, (high - low) * row_of_scales, read)
            scales = to_floats(stored, self.scale_dtype).reshape(high - low, scales_of_row)
            wide = scales.repeat(block_columns, 1)[:, : self.columns]
            factors = wide[np.arange(first, last) // block_rows - low]
            made = from_floats(to_floats(weights, "F8_E4M3").reshape(last - first, self.columns) * factors, "BF16")
            begin = first * row_nbytes
            view[start - offset : stop - offset] = made[start - begin : stop - begin].data
