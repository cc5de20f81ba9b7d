"""Threads for work that goes on beside the caller's, as many as the system lets be started."""

from __future__ import annotations

import os
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def count_processors() -> int:
    """Return how many processors this process may use, of all if the system does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_threads(count: int, name: str) -> list[Executor]:
    """Start up to `count` threads, and return what runs calls in each, one after another.

    They run from now on, so that handing over a call later can neither fail nor be interrupted half way. Where the
    system lets fewer be started ("ulimit -u", "pids.max") there are fewer, and where it lets none, one that runs calls
    in the thread that hands them over.
    """
    started: list[Executor] = []
    for _ in range(count):
        thread = ThreadPoolExecutor(1, name)
        try:
            thread.submit(int).result()
        except RuntimeError:
            break
        started.append(thread)
    return started or [_CallersThread()]


class _CallersThread(Executor):
    """Runs each call at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # whoever asks for the result gets it
            future.set_exception(error)
        return future
