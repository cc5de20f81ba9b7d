"""Dequantized: FP8 weights times the powers of two of their 128 x 128 blocks, as BF16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftw.conversion.recipes.recipe import STEP_NBYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftw.conversion.recipes.recipe import Read, Recipe

BLOCK = 128
_BIAS = 127  # of an exponent's code


@dataclass(frozen=True, slots=True)
class Dequantized:
    """An F8_E4M3 matrix `[rows, columns]` times 2 to the `scale - 127` of each block, F8_E8M0, as BF16.

    The product is exact in F32, and in BF16 as far as that reaches.
    """

    weight: Recipe
    scale: Recipe
    columns: int

    @property
    def nbytes(self) -> int:
        """Two for each weight."""
        return 2 * self.weight.nbytes

    def iter_sources(self) -> Iterator[str]:
        """Yield those of the weight, then of the scale."""
        yield from self.weight.iter_sources()
        yield from self.scale.iter_sources()

    def read_into(self, view: memoryview, offset: int, read: Read) -> None:
        """Read rows and their scales, multiply."""
        row_nbytes = 2 * self.columns
        rows = max(STEP_NBYTES // 4 // row_nbytes, 1)
        first, end = offset // row_nbytes, offset + len(view)
        for row in range(first, -(-end // row_nbytes), rows):
            last = min(row + rows, self.weight.nbytes // self.columns)
            begin = row * row_nbytes
            low, high = max(begin, offset), min(last * row_nbytes, end)
            view[low - offset : high - offset] = self._make(row, last, read)[low - begin : high - begin]

    def _make(self, first: int, last: int, read: Read) -> memoryview:
        import numpy as np

        from ftw.conversion.recipes.casts import from_floats, to_floats

        weights = np.empty((last - first, self.columns), np.uint8)
        self.weight.read_into(weights.reshape(-1).data, first * self.columns, read)
        num_blocks = -(-self.columns // BLOCK)
        top, bottom = first // BLOCK, -(-last // BLOCK)
        codes = np.empty((bottom - top, num_blocks), np.uint8)
        self.scale.read_into(codes.reshape(-1).data, top * num_blocks, read)
        with np.errstate(all="ignore"):
            scales = np.exp2(codes.astype(np.float64) - _BIAS).astype(np.float32)
            of_rows = scales[np.arange(first, last) // BLOCK - top]
            of_all = np.repeat(of_rows, BLOCK, axis=1)[:, : self.columns]
            floats = to_floats(weights.reshape(-1), "F8_E4M3").reshape(of_all.shape) * of_all
        return from_floats(floats.reshape(-1), "BF16").data
