"""Processes that share a segment, stopped at a chosen step; and what is looked up in /proc about them."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from interrupts import interruptible

import ftw

IDENTITY = "a table"
NBYTES = 3 * 4096 + 5

# Tells its progress line by line: "waits" before it waits for one who fills, "stopped" at the step it was to stop at,
# "open 1" or "open 0" for who filled or not, "wrong" for other bytes. A line on standard input makes it close and end.
SCRIPT = """
import contextlib, functools, importlib, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import segment_worker
from ftw.host import file_lock
from ftw.host.shared.segment import open_segment

def tell(line):
    os.write(1, line.encode() + b"\\n")

def hook(target, action, before):
    module, _, name = target.partition(":")
    *owners, name = name.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    function = getattr(owner, name)
    def hooked(*args, **kwargs):
        if before:
            action()
        result = function(*args, **kwargs)
        if not before:
            action()
        return result
    setattr(owner, name, hooked)

def stop():
    tell("stopped")
    sys.stdin.readline()

def halfway():
    pass

def fill(view):
    fillings.append(1)
    middle = len(view) // 2
    view[:middle] = wanted[:middle]
    halfway()
    view[middle:] = wanted[middle:]

folder, identity, nbytes, target, moment = sys.argv[2:]
wanted = segment_worker.content(identity, int(nbytes))
hook("ftw.host.file_lock:lock_exclusive", functools.partial(tell, "waits"), True)
if target:
    hook(target, stop, moment == "before")
rounds = 1 if moment != "forever" else 10**9
try:
    for _ in range(rounds):
        fillings = []
        opened = open_segment(identity, int(nbytes), fill, name="table", folder=Path(folder))
        with contextlib.closing(opened) as segment:
            tell(f"open {len(fillings)}" if segment.view() == wanted else "wrong")
            if rounds == 1:
                sys.stdin.readline()
except KeyboardInterrupt:
    tell("interrupted")
    sys.stdin.readline()
tell("closed")
"""


def content(identity: str, nbytes: int) -> bytes:
    """Return the bytes that belong to an identity."""
    return random.Random(identity).randbytes(nbytes)


def environment() -> dict[str, str]:
    """Return the environment in which a process finds this ftw."""
    return {**os.environ, "PYTHONPATH": str(Path(ftw.__file__).parents[1])}


class Worker:
    """A process that opens a segment."""

    def __init__(
        self, folder: Path, *, identity: str = IDENTITY, nbytes: int = NBYTES, target: str = "", moment: str = "before"
    ) -> None:
        own = str(Path(__file__).parent)
        command = [sys.executable, "-c", SCRIPT, own, str(folder), identity, str(nbytes), target, moment]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with interruptible():
            self.process = subprocess.Popen(command, **pipes, env=environment(), text=True)
        self.pid = self.process.pid

    def line(self, *passing_over: str) -> str:
        """Wait for the next line."""
        while (line := self.process.stdout.readline().rstrip()) in passing_over:
            pass
        return line

    def proceed(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def finish(self) -> None:
        """Let it close the segment, and wait for its end."""
        self.proceed()
        assert self.line() == "closed"
        assert self.process.wait() == 0
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def reapers(folder: Path) -> list[int]:
    """Return the reapers of segments in a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if b"reaper_program.py" in arguments and os.fsencode(folder) in arguments:
                found.append(int(entry.name))
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for what the kernel gives no event for."""
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.002)


def wait_until_nothing_is_left(folder: Path) -> None:
    wait_until(lambda: not any(folder.iterdir()) and not reapers(folder))


def kill_reapers(folder: Path) -> None:
    for pid in reapers(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not reapers(folder))


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Give a folder of its own on /dev/shm, and take it away with the reapers of what was in it."""
    path = Path(tempfile.mkdtemp(prefix="ftw-test-", dir="/dev/shm"))
    yield path
    kill_reapers(path)
    shutil.rmtree(path)


@contextlib.contextmanager
def worker_starter(folder: Path) -> Iterator[Callable[..., Worker]]:
    """Give a function that starts workers on a folder; those that are left are killed at the end."""
    workers = []

    def start_worker(**options: str) -> Worker:
        workers.append(Worker(folder, **options))
        return workers[-1]

    yield start_worker
    for worker in workers:
        worker.kill()
