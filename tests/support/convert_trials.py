"""Conversions that are killed or meet a fault, again and again, each resumed and compared byte for byte.

Run as a script, which imports neither torch nor pytest, so that a trial costs a fork instead of a start of Python:

    convert_trials.py SOURCE WORK {kills,faults} COUNT KILLED RESUMED SEED [LAYOUT]

Makes COUNT trials, and more until KILLED children were killed half-way and RESUMED conversions found something to
keep: how many do depends on how busy the machine is. It gives up after ten times COUNT. It prints one JSON object: how
many trials there were, how many of each kind of end, and every trial that went wrong.
"""

import errno
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from folders import tree

import ftw
from ftw.conversion.conversion import convert
from ftw.conversion.writing import writer

SHARD_LIMIT = 64 << 10
CALLS = (
    "open", "pwrite", "preadv", "fsync", "write", "ftruncate", "rename", "replace", "mkdir", "unlink", "rmdir", "chmod",
    "fchmod", "lstat",
)  # fmt: skip
FAULTS = ("enospc", "eio", "short")


def count_calls(before: Callable[[int, str, tuple[Any, ...]], Any]) -> None:
    """Have `before` called ahead of each system call on files, with its number, its name and its arguments.

    What it returns, unless that is None, takes the call's place.
    """
    numbers = itertools.count(1)  # which threads may share

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            found = before(next(numbers), name, arguments)
            return real(*arguments, **named) if found is None else found

        return call

    for name in CALLS:
        setattr(os, name, wrap(name, getattr(os, name)))


def run_in_child(work: Callable[[], None]) -> int:
    """Fork, and return the child's process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    except OSError:
        status = 3
    finally:
        os._exit(status)


class Trials:
    def __init__(self, source: Path, work: Path, generator: random.Random, layout: str) -> None:
        self.source, self.target, self.generator = source, work / "out", generator
        self.options = {"layout": layout, "embed": "host" if layout == "plain" else "auto", "shard_limit": SHARD_LIMIT}
        self.old = work / "old"
        self.counts = {"trials": 0, "killed": 0, "failed": 0, "resumed": 0}
        self.problems: list[str] = []
        work.mkdir()
        writer._CHUNK_NBYTES = 16 << 10  # so that a small tensor takes several chunks, too
        convert(source, work / "whole", **self.options)
        self.whole = tree(work / "whole")
        convert(source, self.old, shard_limit=4096)
        self.before = tree(self.old)
        self.seconds = min(self.measure() for _ in range(5))
        self.num_calls = self.count()

    def convert(self, *, resume: bool, overwrite: bool) -> ftw.ConversionResult:
        return convert(self.source, self.target, resume=resume, overwrite=overwrite, **self.options)

    def measure(self) -> float:
        """Return how many seconds a conversion takes."""
        self.prepare(overwrite=False)
        began = time.monotonic()
        os.waitpid(run_in_child(lambda: self.convert(resume=False, overwrite=False)), 0)
        return time.monotonic() - began

    def count(self) -> int:
        """Return how many system calls a conversion makes."""
        self.prepare(overwrite=False)
        reading, writing = os.pipe()

        def work() -> None:
            numbers = []
            count_calls(lambda number, name, arguments: numbers.append(number))
            self.convert(resume=False, overwrite=False)
            os.fdopen(writing, "w").write(str(max(numbers)))

        os.waitpid(run_in_child(work), 0)
        os.close(writing)
        with os.fdopen(reading) as file:
            return int(file.read())

    def prepare(self, overwrite: bool) -> None:
        for path in self.target.parent.iterdir():
            if path.name not in ("whole", "old"):
                shutil.rmtree(path)
        if overwrite:
            shutil.copytree(self.old, self.target)

    def check_state(self, what: str, overwrite: bool) -> None:
        """The target is as it was, or complete."""
        found = tree(self.target) if self.target.exists() else {}
        found.pop(".ftw-journal", None)
        if found not in ([self.before, self.whole] if overwrite else [{}, self.whole]):
            self.problems.append(f"{what}: the target holds {sorted(found)}")

    def finish(self, what: str, overwrite: bool) -> None:
        """Resume, and compare."""
        result = self.convert(resume=True, overwrite=overwrite)
        self.counts["resumed"] += bool(result.resumed_nbytes)
        if tree(self.target) != self.whole:
            self.problems.append(f"{what}: other bytes after --resume")
        if not ftw.verify(self.target, against=self.source).is_ok:
            self.problems.append(f"{what}: does not verify")
        left = {path.name for path in self.target.parent.iterdir()} - {"whole", "old", "out"}
        if left:
            self.problems.append(f"{what}: {left} are left")

    def kill(self, number: int) -> None:
        """Kill a conversion and those that resume it, up to three times, then let one end."""
        overwrite = number % 3 == 0
        self.prepare(overwrite)
        self.counts["trials"] += 1
        places = []
        for attempt in range(self.generator.randint(1, 3)):
            resume = attempt > 0
            if number % 2:
                place = self.generator.randint(1, self.num_calls)
                places.append(f"call {place}")

                def strike(count: int, name: str, arguments: tuple[Any, ...], place: int = place) -> None:
                    if count == place:
                        os.kill(os.getpid(), signal.SIGKILL)

                def work(resume: bool = resume) -> None:
                    count_calls(strike)
                    self.convert(resume=resume, overwrite=overwrite)

                child = run_in_child(work)
            else:
                child = run_in_child(lambda resume=resume: self.convert(resume=resume, overwrite=overwrite))
                seconds = self.generator.uniform(0, 1.2 * self.seconds)
                places.append(f"{seconds:.4f} s")
                time.sleep(seconds)
                os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            self.counts["killed"] += os.WIFSIGNALED(status)
            self.check_state(f"kill {number} at {places}", overwrite)
        self.finish(f"kill {number} at {places}", overwrite)

    def fault(self, number: int) -> None:
        """Let one system call fail, or write less than it should."""
        overwrite = number % 3 == 0
        self.prepare(overwrite)
        self.counts["trials"] += 1
        kind = FAULTS[number % len(FAULTS)]
        place = self.generator.randint(1, self.num_calls)
        real_pwrite, real_write = os.pwrite, os.write

        def strike(count: int, name: str, arguments: tuple[Any, ...]) -> Any:
            if kind == "short":
                if count < place or name not in ("pwrite", "write"):
                    return None
                if name == "pwrite":
                    return real_pwrite(arguments[0], arguments[1][: max(4096, len(arguments[1]) // 3)], arguments[2])
                return real_write(arguments[0], arguments[1][:5])
            is_full_disk = kind == "enospc" and count >= place and name in ("pwrite", "write", "mkdir")
            if is_full_disk or (kind == "eio" and count == place):
                code = errno.ENOSPC if is_full_disk else errno.EIO
                raise OSError(code, os.strerror(code))
            return None

        def work() -> None:
            count_calls(strike)
            self.convert(resume=False, overwrite=overwrite)

        _, status = os.waitpid(run_in_child(work), 0)
        failed = os.waitstatus_to_exitcode(status)
        self.counts["failed"] += failed == 3
        what = f"{kind} at call {place} of trial {number}"
        if failed not in (0, 3) or (kind == "short" and failed):
            self.problems.append(f"{what}: exit status {failed}")
        self.check_state(what, overwrite)
        self.finish(what, overwrite)


def main(source: str, work: str, kind: str, count: int, killed: int, resumed: int, seed: int, layout: str) -> None:
    trials = Trials(Path(source), Path(work), random.Random(seed), layout)
    one, counts = {"kills": trials.kill, "faults": trials.fault}[kind], trials.counts
    for number in range(10 * count):
        if number >= count and counts["killed"] >= killed and counts["resumed"] >= resumed:
            break
        one(number)
    print(json.dumps({**trials.counts, "problems": trials.problems, "calls": trials.num_calls}))


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:8]), *(sys.argv[8:] or ["plain"]))
