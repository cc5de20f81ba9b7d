"""Ids for lookups, as text has them and evenly spread."""

from __future__ import annotations

import torch


class Ids:
    """Draws ids of a table of `rows` rows.

    "uniform" draws every row alike. "zipf" draws the row of rank r in proportion to 1/r, as words of a text are spread
    (8192 of 151,936 hold about 3,850 different ones); which row has which rank is shuffled.
    """

    def __init__(self, rows: int, device: torch.device, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._rows = rows
        self._device = device
        self._weights = torch.arange(1, rows + 1, dtype=torch.float64).reciprocal().cumsum(0)
        self.by_rank = torch.randperm(rows, generator=self._generator)

    def draw(self, distribution: str, count: int) -> torch.Tensor:
        """Return int64 `[count]` on the device."""
        if distribution == "uniform":
            ids = torch.randint(0, self._rows, (count,), generator=self._generator)
        else:
            places = torch.rand(count, generator=self._generator, dtype=torch.float64) * self._weights[-1]
            ids = self.by_rank[torch.searchsorted(self._weights, places).clamp_(max=self._rows - 1)]
        return ids.to(self._device)

    def shift(self) -> None:
        """Give every rank another row, as when the text turns to something else."""
        self.by_rank = torch.randperm(self._rows, generator=self._generator)
