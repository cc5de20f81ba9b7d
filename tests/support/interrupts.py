"""Processes that take SIGINT as those of a terminal do; a job in the background of a script ignores it."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let processes that are started meanwhile take SIGINT: a new program keeps what ignores it, and no handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
