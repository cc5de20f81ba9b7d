"""TensorBudget: how long the headers of a checkpoint may be in all, and how much memory what they describe may take.

A tensor takes some 300 bytes and its name, whatever it took in the header: 50 bytes at least, 110 to 200 with names as
models have them. Names are counted as Python holds them, 4 bytes a character where one is beyond the Basic Multilingual
Plane, and so are shapes that no other tensor has. With that bounded, opening takes at most 64 MiB and twice the
headers' bytes, of which the parser's windows and the rest take 16 MiB. No model comes near.

Zeros of a sparse file, and a file that a thousand links name, cost no disk. So what is read and walked through is
counted over all files of a checkpoint too, before it is.
"""

from __future__ import annotations

from collections import Counter
from sys import getsizeof
from typing import TYPE_CHECKING

from ftw.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MAX_HEADERS_NBYTES = 256 << 20  # of all files, an index too; the largest models have some 20 MiB
MAX_DIMENSIONS = 64  # as many as NumPy has at most
TENSOR_NBYTES = 220  # beside its name and its shape
KEY_NBYTES = 80  # in the set of an object's keys while it is walked
_FREE_NBYTES = 48 << 20
_MAX_SHARED = 1 << 12  # shapes; of all but the strangest checkpoint there are a few dozen
_TUPLE_NBYTES = 16  # before a tuple, for the garbage collector
_INTEGER_NBYTES = 32
_MAX_SMALL = 256  # integers up to this one are there once and for all


class TensorBudget:
    """Counts what is kept of the headers of a checkpoint against their bytes, over all of its files.

    Attributes:
        num_walked: Elements of a GGUF's arrays that are passed over one by one, by the name of their type.
    """

    def __init__(self) -> None:
        self._taken = 0
        self._most = _FREE_NBYTES
        self._nbytes = 0
        self._walked = 0
        self.num_walked: Counter[str] = Counter()
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}

    @property
    def nbytes_left(self) -> int:
        """Bytes that further headers may have."""
        return MAX_HEADERS_NBYTES - self._walked

    def add_header(self, nbytes: int, path: Path) -> None:
        """Take note of a header, or a part of one, before what it describes is kept.

        Raises:
            CheckpointError: The headers are too long.
        """
        self.add_skipped(nbytes, path)
        self._nbytes += nbytes
        self._most += 2 * nbytes

    def add_skipped(self, nbytes: int, path: Path) -> None:
        """Take note of a part of a header that is passed over: memory for it is not needed.

        Raises:
            CheckpointError: The headers are too long.
        """
        self._walked += nbytes
        if self._walked > MAX_HEADERS_NBYTES:
            problem = f"the headers take {self._walked} bytes up to here, at most {MAX_HEADERS_NBYTES} are allowed"
            raise CheckpointError(path, "header", problem)

    def take(self, nbytes: int, path: Path, subject: str) -> None:
        """Count memory that is about to be kept.

        Raises:
            CheckpointError: There is too much.
        """
        self._taken += nbytes
        if self._taken > self._most:
            problem = f"describes more than {self._most} bytes of memory hold, as much as {self._nbytes} bytes may take"
            raise CheckpointError(path, subject, problem)

    def give_back(self, nbytes: int) -> None:
        """Count memory that was let go."""
        self._taken -= nbytes

    def keep_shape(self, sizes: Sequence[int], path: Path, subject: str) -> tuple[int, ...]:
        """Return sizes as a tuple, the same one for equal ones; most tensors share theirs with others.

        Raises:
            CheckpointError: There is too much.
        """
        shape = tuple(sizes)
        kept = self._shapes.get(shape)
        if kept is not None:
            return kept
        large = sum(size > _MAX_SMALL for size in shape)
        self.take(getsizeof(shape) + _TUPLE_NBYTES + _INTEGER_NBYTES * large, path, subject)
        if len(self._shapes) < _MAX_SHARED:
            self._shapes[shape] = shape
        return shape
