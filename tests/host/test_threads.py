"""Threads that run calls in order: as many as were asked for, or as there can be."""

import threading
from collections.abc import Callable

import pytest
from thread_limit import limit_threads

from ftw.host.threads import start_threads


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [(9, ["ftw-test_0", "ftw-test_0", "ftw-test_0"]), (2, ["ftw-test_0", "ftw-test_0"]), (0, ["MainThread"])],
    ids=str,
)
def test_calls_run_in_the_threads_that_there_can_be(
    monkeypatch: pytest.MonkeyPatch, allowed: int, expected: list[str]
) -> None:
    limit_threads(monkeypatch, allowed)
    started = start_threads(3, "ftw-test")
    futures = [
        executor.submit(lambda: (threading.current_thread().name, threading.get_ident())) for executor in started
    ]
    found = [future.result() for future in futures]
    assert [name for name, _ in found] == expected
    assert len({identity for _, identity in found}) == len(expected)
    for executor in started:
        executor.shutdown()


@pytest.mark.parametrize("allowed", [1, 0], ids=["thread", "caller"])
def test_results_and_errors_come_from_the_future(monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    limit_threads(monkeypatch, allowed)
    (executor,) = start_threads(1, "ftw-test")
    order: list[int] = []
    add: Callable[[int], None] = order.append
    futures = [executor.submit(add, number) for number in range(5)]
    failed = executor.submit(fail)
    assert [future.result() for future in futures] == [None] * 5
    assert order == list(range(5))
    with pytest.raises(KeyboardInterrupt):
        failed.result()
    executor.shutdown()
