"""Cursor: the one place that unpacks binary headers, each length checked against the bytes that remain."""

from __future__ import annotations

import functools
from struct import Struct
from typing import TYPE_CHECKING, Any

from ftw.errors import CheckpointError
from ftw.readers.tensor_budget import MAX_HEADERS_NBYTES

if TYPE_CHECKING:
    from ftw.files import WeightFile

WINDOW_NBYTES = 1 << 20  # what is held of the file at a time


class Cursor:
    """A place in a file, from which integers, floats and strings are read one after another.

    Attributes:
        file: The file.
        byte_order: "<" or ">", as the struct module has it.
        subject: What is being read, as messages name it: "header", a key, a tensor.

    Args:
        file: The file.
        byte_order: "<" or ">".
        offset: Where to begin.
        most: How many bytes are gone through at most, as a window may show; None for the whole file.
    """

    __slots__ = ("_at", "_end", "_start", "_window", "byte_order", "file", "subject")

    def __init__(self, file: WeightFile, byte_order: str, offset: int = 0, most: int | None = None) -> None:
        self.file = file
        self._end = file.nbytes if most is None else offset + most
        self.byte_order = byte_order
        self.subject = "header"
        self._start = offset  # where the window begins in the file
        self._window = b""
        self._at = 0  # in the window; never past its end

    @property
    def position(self) -> int:
        """Offset in the file of the next byte to be read."""
        return self._start + self._at

    @property
    def remaining(self) -> int:
        """Bytes from there to the end of the file."""
        return self.file.nbytes - self.position

    def error(self, problem: str) -> CheckpointError:
        """Return an error about the current subject."""
        return CheckpointError(self.file.path, self.subject, problem)

    def check_count(self, what: str, count: int, min_nbytes: int) -> None:
        """Check that `count` things of at least `min_nbytes` each can follow.

        Raises:
            CheckpointError: They cannot.
        """
        if count * min_nbytes > self.remaining:
            problem = f"{what} is {count}, of at least {min_nbytes} bytes each, but only {self.remaining} bytes follow"
            raise self.error(problem)

    def unpack(self, fields: str) -> tuple[Any, ...]:
        """Read `fields`, written as the struct module has them, without a byte order.

        Raises:
            CheckpointError: The file ends before.
        """
        packed = _struct(self.byte_order + fields)
        self._hold(packed.size)
        values = packed.unpack_from(self._window, self._at)
        self._at += packed.size
        return values

    def read_u32(self) -> int:
        """Read an unsigned integer of 4 bytes."""
        value: int = self.unpack("I")[0]
        return value

    def read_u64(self) -> int:
        """Read an unsigned integer of 8 bytes."""
        value: int = self.unpack("Q")[0]
        return value

    def read_bytes(self, nbytes: int) -> bytes:
        """Read the next bytes as they are.

        Raises:
            CheckpointError: The file ends before.
        """
        self._check(nbytes)
        if nbytes > WINDOW_NBYTES:  # no window grows with what a file asks for
            content = self.file.read(self.position, nbytes)
            self._seek(self.position + nbytes)
            return content
        self._hold(nbytes)
        self._at += nbytes
        return self._window[self._at - nbytes : self._at]

    def skip(self, nbytes: int) -> None:
        """Pass over bytes without reading them.

        Raises:
            CheckpointError: The file ends before.
        """
        self._check(nbytes)
        self._seek(self.position + nbytes)

    def skip_strings(self, count: int) -> None:
        """Pass over strings, each after its length in 8 bytes; half a million of a vocabulary's take 0.03 s.

        Raises:
            CheckpointError: The file ends before.
        """
        unpack = _struct(self.byte_order + "Q").unpack_from
        left = count
        while left:
            self._hold(8)
            window, at = self._window, self._at
            last = len(window) - 8
            done = left
            for number in range(left):
                if at > last:
                    done = number
                    break
                at += 8 + unpack(window, at)[0]
            left -= done
            self.skip(at - self._at)

    def _check(self, nbytes: int) -> None:
        if nbytes > self.remaining:
            problem = f"{nbytes} bytes are needed at byte {self.position}, but only {self.remaining} remain in the file"
            raise self.error(problem)
        if self.position + nbytes > self._end:
            problem = f"the header reaches byte {self.position + nbytes} at least"
            raise self.error(f"{problem}, at most {MAX_HEADERS_NBYTES} bytes are allowed for all of a checkpoint")

    def _hold(self, nbytes: int) -> None:
        """Make the window hold the next bytes, at most `WINDOW_NBYTES`."""
        if self._at + nbytes <= len(self._window):
            return
        self._check(nbytes)
        self._start, self._at = self.position, 0
        self._window = b""  # freed before the next one is read
        self._window = self.file.read(self._start, min(WINDOW_NBYTES, self.remaining))

    def _seek(self, position: int) -> None:
        at = position - self._start
        if at <= len(self._window):
            self._at = at
        else:
            self._start, self._at, self._window = position, 0, b""


@functools.cache
def _struct(fields: str) -> Struct:
    return Struct(fields)
