"""TensorBudget: how many tensors the headers of a checkpoint may bring.

A tensor that has been parsed takes about 350 bytes, whatever it took in the header: 50 at least, 110 to 200 with names
as models have them. With a bound on tensors, opening takes at most 64 MiB and twice the headers' bytes, of which the
parser's windows and the rest take 16 MiB. No model comes near: 370,000 tensors with headers of 60 MB may be 470,000.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftw.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

_TENSOR_NBYTES = 350
_FREE_NBYTES = 48 << 20


class TensorBudget:
    """Counts the tensors of a checkpoint against the bytes of its headers, over all of its files."""

    def __init__(self) -> None:
        self._num_tensors = 0
        self._most = 0
        self._nbytes = 0

    def add_header(self, nbytes: int) -> None:
        """Take note of a header, before it is parsed."""
        self._nbytes += nbytes
        self._most = (_FREE_NBYTES + 2 * self._nbytes) // _TENSOR_NBYTES

    def take(self, path: Path, subject: str) -> None:
        """Count one tensor.

        Raises:
            CheckpointError: There are too many.
        """
        self._num_tensors += 1
        if self._num_tensors > self._most:
            problem = f"lists more than {self._most} tensors, as many as {self._nbytes} bytes of headers may hold"
            raise CheckpointError(path, subject, problem)
