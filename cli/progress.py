"""Progress on stderr: a bar for people, or a JSON object per second for programs that supervise a command.

    {"event": "progress", "command": "convert", "done_bytes": 1073741824, "total_bytes": 4294967296,
     "bytes_per_second": 1610612736, "eta_seconds": 2.0}

The first comes at once, the last with the end of the work, whether that succeeded or not. `total_bytes` and
`eta_seconds` are null as long as they are not known. The rate is that of the last ten seconds.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ProgressKind = Literal["bar", "json", "none"]
ProgressOption = Annotated[
    ProgressKind,
    typer.Option("--progress", help="On stderr: a bar where that is a terminal, a JSON object per second, or nothing."),
]
_INTERVAL = 1.0  # seconds
_DELAY = 1.0  # seconds, before a bar is shown
_SILENT = 2.0  # seconds, before anything is shown of what has no bar
_WINDOW = 10  # intervals


@contextmanager
def show_progress(command: str, kind: ProgressKind) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that takes bytes done and all bytes."""
    if kind == "bar":
        with _bar(command) as update:
            yield update
    elif kind == "json":
        with _JsonProgress(command) as update:
            yield update
    else:
        yield _ignore


@contextmanager
def _bar(command: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar with bytes, rate and time left, after a second, and only where stderr is a terminal."""
    from tqdm import tqdm

    bar = tqdm(desc=command, unit="B", unit_scale=True, unit_divisor=1024, delay=_DELAY, disable=None, leave=False)

    def update(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    with bar:
        yield update


@contextmanager
def show_waiting(command: str, *, is_quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Show on a terminal that a command is at work, for how long and on what: the function that is yielded says that.

    The line comes after two seconds and goes with the end.
    """
    if is_quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from tqdm import tqdm

    line = tqdm(desc=command, bar_format="{desc}: {elapsed}", delay=1 << 30, leave=False)  # shown by `refresh` alone
    ended = threading.Event()

    def show() -> None:
        seconds = _SILENT
        while not ended.wait(seconds):
            line.refresh()
            seconds = _INTERVAL

    thread = threading.Thread(target=show, name="ftw-waiting", daemon=True)
    thread.start()
    try:
        yield lambda text: line.set_description_str(f"{command}, {text}", refresh=False)
    finally:
        ended.set()
        thread.join()
        line.clear()
        line.close()


def _ignore(done: int, total: int) -> None:
    """Take no notice of progress."""


class _JsonProgress:
    """Prints an object per second from a thread of its own, so that one comes while a disk is slow, too."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._now: tuple[int, int | None] = (0, None)
        self._samples: deque[tuple[float, int]] = deque(maxlen=_WINDOW + 1)
        self._is_heard = True
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ftw-progress", daemon=True)

    def __enter__(self) -> Callable[[int, int], None]:
        self._print()
        self._thread.start()
        return self._update

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._print()

    def _update(self, done: int, total: int) -> None:
        self._now = (done, total)

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL):
            self._print()

    def _print(self) -> None:
        if not self._is_heard:
            return
        done, total = self._now
        self._samples.append((time.monotonic(), done))
        seconds = self._samples[-1][0] - self._samples[0][0]
        rate = (done - self._samples[0][1]) / seconds if seconds else 0.0
        eta = None if total is None else 0.0 if done >= total else (total - done) / rate if rate else None
        value = {
            "event": "progress",
            "command": self._command,
            "done_bytes": done,
            "total_bytes": total,
            "bytes_per_second": round(rate),
            "eta_seconds": None if eta is None else round(eta, 1),
        }
        try:
            sys.stderr.write(json.dumps(value) + "\n")  # by one call, or a warning might fall in between
            sys.stderr.flush()
        except OSError:  # who supervised has left, which is no reason to fail
            self._is_heard = False
