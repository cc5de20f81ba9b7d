"""Somebody else who changes a checkpoint right before a system call that looks at it, as its owner may at any time."""

import contextlib
import io
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftw.host import safe_open

_WATCHED = ("open", "stat", "lstat", "fstat", "readlink", "scandir", "listdir", "preadv")
_JUDGING = ("lstat", "readlink")  # tell a link from what it leads to
_NUM_RANDOM = 8


class Flip:
    """A name that is what it was, or a link to something else; `turn` makes it the one or the other."""

    def __init__(self, path: Path, elsewhere: Path) -> None:
        self._path = path
        self._elsewhere = elsewhere
        self._aside = elsewhere.parent / f"{path.name}.aside"
        self._is_link = False

    def turn(self, to_link: bool) -> None:
        """Make the name a link, or what it was."""
        if to_link == self._is_link:
            return
        if to_link:
            self._path.rename(self._aside)
            self._path.symlink_to(self._elsewhere)
        else:
            self._path.unlink()
            self._aside.rename(self._path)
        self._is_link = to_link


@contextlib.contextmanager
def before_each_call(monkeypatch: pytest.MonkeyPatch, act: Callable[[int, str], None]) -> Iterator[list[int]]:
    """Before each call that opens, looks at or reads a file call `act`; yield how many there were.

    It is given the call's number, from 0 on, and its name.
    """
    count, acting = [0], [False]

    def telling(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if not acting[0]:
                acting[0] = True
                act(count[0], function.__name__)
                count[0] += 1
                acting[0] = False
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for name in _WATCHED:
            patch.setattr(os, name, telling(getattr(os, name)))
        patch.setattr(os, "supports_dir_fd", {*os.supports_dir_fd, os.open})
        patch.setattr(io, "open", telling(io.open))
        patch.setattr(safe_open, "_openat2", telling(safe_open._openat2))
        yield count


def patterns(num_calls: int) -> Iterator[Callable[[int, str], bool]]:
    """Yield when a name is a link, by the number of a call and its name.

    At one call, from one on, at whatever does not look for links, and at any, the same ones each time.
    """
    for nth in range(num_calls):
        yield lambda call, name, nth=nth: call == nth
    for nth in range(0, num_calls, 3):
        yield lambda call, name, nth=nth: call >= nth
    yield lambda call, name: name not in _JUDGING
    yield lambda call, name: name in _JUDGING
    for seed in range(_NUM_RANDOM):
        bits = random.Random(seed).getrandbits(2 * num_calls + 64)
        yield lambda call, name, bits=bits: bool(bits >> call & 1)
