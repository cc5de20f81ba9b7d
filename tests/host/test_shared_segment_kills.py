"""Whatever is killed at whatever step: the others get the right bytes, and nothing is left after the last of them."""

import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from amounts import amount
from segment_worker import (
    IDENTITY,
    NBYTES,
    Worker,
    content,
    kill_reapers,
    reapers,
    scratch_folder,
    wait_until_nothing_is_left,
    worker_starter,
)

from ftw.host.shared.segment import open_segment

PARTS = "ftw.host."
# Each step with what a second process that comes then does: it opens and fills, waits, opens only, or is held up.
STEPS = {
    "os:ftruncate before": "open 1",
    "os:ftruncate after": "open 1",
    f"{PARTS}shared.file:write_header after": "open 1",
    f"{PARTS}shared.file:start_reaper before": "open 1",
    f"{PARTS}shared.file:start_reaper after": "open 1",
    "os:link before": "open 1",
    "os:link after": "open 1",
    f"{PARTS}file_lock:lock_exclusive before": "open 1",
    f"{PARTS}file_lock:lock_exclusive after": "waits",
    f"{PARTS}shared.pages:SharedPages.populate before": "waits",
    f"{PARTS}shared.pages:_madvise after": "waits",
    f"{PARTS}shared.pages:SharedPages.populate after": "waits",
    "__main__:fill before": "waits",
    "__main__:halfway before": "waits",
    "__main__:fill after": "waits",
    f"{PARTS}shared.file:mark_ready before": "waits",
    f"{PARTS}shared.file:mark_ready after": "open 0",
    f"{PARTS}file_lock:unlock after": "open 0",
    f"{PARTS}file_lock:try_lock_exclusive before": "open 0",
    f"{PARTS}file_lock:try_lock_exclusive after": "",
    f"{PARTS}shared.file:_unlink before": "",
    f"{PARTS}shared.file:_unlink after": "open 1",
}
steps = pytest.mark.parametrize("step", STEPS, ids=lambda step: step.removeprefix(PARTS).replace(" ", "-"))


@pytest.fixture
def folder() -> Iterator[Path]:
    with scratch_folder() as path:
        yield path


@pytest.fixture
def start(folder) -> Iterator[Callable[..., Worker]]:
    with worker_starter(folder) as start_worker:
        yield start_worker


def stopped_worker(start: Callable[..., Worker], step: str) -> Worker:
    """Return a worker that stands at a step, of its opening or of its closing."""
    target, moment = step.split()
    worker = start(target=target, moment=moment)
    line = worker.line("waits")
    if line == "open 1":
        worker.proceed()
        line = worker.line()
    assert line == "stopped"
    return worker


@steps
def test_killed_alone_leaves_nothing_behind(folder, start, step):
    stopped_worker(start, step).kill()
    wait_until_nothing_is_left(folder)


@steps
def test_killed_is_followed_by_one_that_gets_the_right_bytes(folder, start, step):
    stopped_worker(start, step).kill()
    survivor = start()
    assert survivor.line("waits") in {"open 0", "open 1"}
    survivor.finish()
    wait_until_nothing_is_left(folder)


@steps
def test_killed_beside_another_that_gets_the_right_bytes(folder, start, step):
    killed, survivor = stopped_worker(start, step), start()
    expected = STEPS[step]
    if expected:
        assert survivor.line(*{"waits"} - {expected}) == expected
    killed.kill()
    if expected == "waits":
        assert survivor.line("waits") == "open 1"
    if not expected:  # it attaches before the reaper removes the name, or finds none
        assert survivor.line("waits") in {"open 0", "open 1"}
    survivor.finish()
    wait_until_nothing_is_left(folder)


def test_all_killed_leave_nothing_behind(folder, start):
    workers = [start() for _ in range(3)]
    assert sorted(worker.line("waits") for worker in workers) == ["open 0", "open 0", "open 1"]
    for worker in workers:
        worker.kill()
    wait_until_nothing_is_left(folder)


def test_users_that_go_leave_the_name_to_the_others(folder, start):
    workers = [start() for _ in range(3)]
    for worker in workers:
        assert worker.line("waits").startswith("open")
    (path,) = folder.iterdir()
    inode = path.stat().st_ino
    workers[0].kill()
    workers[1].finish()
    assert path.stat().st_ino == inode
    workers[2].finish()
    wait_until_nothing_is_left(folder)


def test_without_its_reaper_the_last_to_close_removes_the_name(folder, start):
    workers = [start(), start()]
    for worker in workers:
        worker.line("waits")
    kill_reapers(folder)
    workers[0].finish()
    assert len(list(folder.iterdir())) == 1
    workers[1].finish()
    assert not any(folder.iterdir())


def test_two_that_close_at_once_without_a_reaper_remove_the_name(folder, start):
    workers = [start(target=f"{PARTS}file_lock:try_lock_exclusive", moment="after") for _ in range(2)]
    for worker in workers:
        worker.line("waits")
    kill_reapers(folder)
    for worker in workers:  # each fails, as the other still holds its lock
        worker.proceed()
        assert worker.line() == "stopped"
    for worker in workers:  # the first fails again, the second one's lock is the last
        worker.proceed()
        assert worker.line() == "stopped"
        worker.finish()
    assert not any(folder.iterdir())


def test_what_is_left_without_a_reaper_is_swept_by_the_next_opening(folder, start):
    worker = start(identity="another table")
    worker.line("waits")
    kill_reapers(folder)
    worker.kill()
    (left,) = folder.iterdir()
    with contextlib.closing(open_segment(IDENTITY, NBYTES, lambda view: None, name="table", folder=folder)) as segment:
        assert list(folder.iterdir()) == [segment.path] != [left]


def test_what_is_left_complete_without_a_reaper_is_used_again(folder, start):
    worker = start()
    worker.line("waits")
    kill_reapers(folder)
    worker.kill()
    second = start()
    assert second.line() == "open 0"
    assert len(reapers(folder)) == 1
    second.kill()
    wait_until_nothing_is_left(folder)


def test_sweep_spares_what_is_in_use_and_foreign_names(folder, start):
    worker = start(identity="another table")
    worker.line("waits")
    foreign = folder / "ftw-0-notes"
    foreign.write_text("mine")
    with contextlib.closing(open_segment(IDENTITY, NBYTES, lambda view: None, name="table", folder=folder)):
        assert len(list(folder.iterdir())) == 3
    worker.finish()
    assert list(folder.iterdir()) == [foreign]


@pytest.mark.parametrize("kind", ["mode", "names"])
def test_sweep_spares_what_is_not_trusted(folder, kind):
    left = folder / f"ftw-{os.geteuid()}-{0:032x}"
    left.write_bytes(b"")
    left.chmod(0o600)
    if kind == "mode":
        left.chmod(0o666)
    else:
        os.link(left, folder / "second")
    with contextlib.closing(open_segment(IDENTITY, NBYTES, lambda view: None, name="table", folder=folder)):
        assert left.exists()
    left.chmod(0o600)
    (folder / "second").unlink(missing_ok=True)
    with contextlib.closing(open_segment(IDENTITY, NBYTES, lambda view: None, name="table", folder=folder)):
        assert not left.exists()


def test_who_attaches_starts_another_reaper_for_a_killed_one(folder, start):
    first = start()
    first.line("waits")
    kill_reapers(folder)
    second = start()
    assert second.line() == "open 0"
    assert len(reapers(folder)) == 1
    first.kill()
    second.kill()
    wait_until_nothing_is_left(folder)


def test_reaper_outlives_the_signals_that_end_a_session(folder, start):
    worker = start()
    worker.line("waits")
    (reaper,) = reapers(folder)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        os.kill(reaper, number)
    worker.kill()
    wait_until_nothing_is_left(folder)


def test_interrupted_waiter_leaves_the_others_alone(folder, start):
    filler = stopped_worker(start, "__main__:halfway before")
    waiter = start()
    assert waiter.line() == "waits"
    waiter.process.send_signal(signal.SIGINT)
    assert waiter.line() == "interrupted"
    filler.proceed()
    assert filler.line() == "open 1"
    filler.finish()  # the last one, although the waiter lives on
    assert not any(folder.iterdir())
    waiter.finish()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(amount(1, 4)), ids=lambda seed: f"seed{seed}")
def test_random_kills_never_give_wrong_bytes(folder, start, seed):
    chance = random.Random(seed)
    workers = [start(moment="forever") for _ in range(3)]
    for _ in range(20):
        index = chance.randrange(3)
        for _ in range(chance.randrange(1, 12)):
            line = workers[index].line("waits")
            assert line in {"open 0", "open 1"}
        if chance.random() < 0.3:
            for pid in reapers(folder)[:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        workers[index].kill()
        workers[index] = start(moment="forever")
    for worker in workers:
        assert worker.line("waits") in {"open 0", "open 1"}
        worker.kill()
    with contextlib.closing(open_segment(IDENTITY, NBYTES, fill, name="table", folder=folder)) as segment:
        assert segment.view() == content(IDENTITY, NBYTES)
    wait_until_nothing_is_left(folder)


def fill(view: memoryview) -> None:
    view[:] = content(IDENTITY, NBYTES)
