"""A program that takes from Python what another system lacks, and then inspects, converts and verifies.

    python other_system.py SYSTEM OUT SOURCE ...    prints the reports as JSON; SYSTEM is Linux, macOS or Windows

Modules find out what there is when they are imported, so this is a process of its own.
"""

import builtins
import contextlib
import ctypes
import io
import json
import mmap
import os
import shutil
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub  # noqa: F401 - it, and what it imports, as installed for this system
import numpy  # noqa: F401
import tqdm  # noqa: F401
import typer  # noqa: F401
import xxhash  # noqa: F401

LACKED_BY_BOTH = """
O_DIRECT O_TMPFILE preadv pwritev sched_getaffinity posix_fadvise posix_fallocate
"""
LACKED_BY_WINDOWS = """
O_DIRECTORY O_NOFOLLOW O_CLOEXEC O_NONBLOCK pread pwrite register_at_fork statvfs fstatvfs fork geteuid getuid fchmod
"""
PLATFORMS = {"macOS": "darwin", "Windows": "win32"}


def take_away(system: str) -> None:
    """Take away what a system lacks."""
    lacked = LACKED_BY_BOTH + (LACKED_BY_WINDOWS if system == "Windows" else "")
    _delete(os, lambda name: name in lacked.split())
    _delete(mmap, lambda name: name.startswith(("MADV_", "MAP_") if system == "Windows" else "MADV_"))
    ctypes.CDLL = _refusing(ctypes.CDLL, lambda name: name is None, OSError("no such library"))
    for module, name in ((builtins, "open"), (io, "open"), (os, "open")):
        absent = FileNotFoundError(2, "No such file or directory")
        setattr(module, name, _refusing(getattr(module, name), lambda path: str(path).startswith("/proc"), absent))
    if system == "Windows":
        _become_windows()
    else:
        import fcntl

        _delete(fcntl, lambda name: name.startswith("F_OFD_"))


def _become_windows() -> None:
    sys.modules["fcntl"] = sys.modules["resource"] = None
    shutil._use_fd_functions = False
    shutil.disk_usage = lambda path: namedtuple("usage", "total used free")(1 << 40, 0, 1 << 40)
    os.open = _refusing(os.open, os.path.isdir, PermissionError(13, "Permission denied"))
    lstat, rename = os.lstat, os.rename

    def lstat_without_blocks(*arguments: Any, **options: Any) -> SimpleNamespace:
        found = lstat(*arguments, **options)
        names = [name for name in dir(found) if name.startswith("st_") and name != "st_blocks"]
        return SimpleNamespace(**{name: getattr(found, name) for name in names})

    def rename_to_new(old: Any, new: Any, **options: Any) -> None:
        if os.path.lexists(new):
            raise FileExistsError(17, "File exists", str(old), None, str(new))
        rename(old, new, **options)

    os.lstat, os.rename = lstat_without_blocks, rename_to_new


def _delete(module: Any, is_lacked: Any) -> None:
    for name in [name for name in dir(module) if is_lacked(name)]:
        delattr(module, name)


def _refusing(function: Any, is_refused: Any, error: OSError) -> Any:
    def call(first: Any, *arguments: Any, **options: Any) -> Any:
        if is_refused(first):
            raise error
        return function(first, *arguments, **options)

    return call


def import_ftw(system: str) -> Any:
    """Import ftw and its command line as on a system."""
    real, sys.platform = sys.platform, PLATFORMS.get(system, sys.platform)
    import ftw.cli.main

    import ftw

    sys.platform = real
    return ftw


def use(ftw: Any, source: Path, out: Path) -> Any:
    """Inspect a source, convert it three times, and verify that; return the report."""

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        ftw.convert(source, out, embed="auto", progress=interrupt)
    ftw.convert(source, out, embed="auto", resume=True)
    ftw.convert(source, out, embed="auto", resume=True)  # compares
    for against in (None, source):
        assert ftw.verify(out, against=against).is_ok
    ftw.convert(source, out, embed="auto", overwrite=True)
    assert ftw.verify(out, against=source).is_ok
    return ftw.inspect(source).to_dict()


def main(system: str, out: str, *sources: str) -> None:
    """Do what the program is for."""
    if system != "Linux":
        take_away(system)
    ftw = import_ftw(system)
    reports = [use(ftw, Path(source), Path(out) / f"{number}") for number, source in enumerate(sources)]
    print(json.dumps(reports))


if __name__ == "__main__":
    main(*sys.argv[1:])
