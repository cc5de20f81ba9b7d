"""Problems: what is wrong with a checkpoint, one line each, as many of them as a person may want to read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftw.errors import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_LINES = 10_000


class Problems:
    """Lines that say what is wrong with a checkpoint: the first 10,000 of them, and how many more there were."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lines: list[str] = []
        self._count = 0

    def add(self, line: str) -> None:
        """Add one; what cannot be printed becomes an escape."""
        self._count += 1
        if len(self._lines) < MAX_LINES:
            self._lines.append(line if line.isprintable() else ascii(line)[1:-1])

    def add_all(self, lines: Iterable[str]) -> None:
        """Add several."""
        for line in lines:
            self.add(line)

    def lines(self) -> tuple[str, ...]:
        """Return the lines; if some were left out, the last one says how many."""
        left = self._count - len(self._lines)
        last = (f"{printable(self._source)}: problems: {left} more are not listed",) if left else ()
        return (*self._lines, *last)
