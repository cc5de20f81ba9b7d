"""A process that may not start more threads, as under `ulimit -u` or a cgroup's pids.max."""

import threading

import pytest


def limit_threads(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Let no more than `limit` threads be started."""
    start, started = threading.Thread.start, []

    def start_some(thread: threading.Thread) -> None:
        if len(started) == limit:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
