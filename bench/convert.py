"""`ftw bench convert`: 4 GiB of sharded safetensors and a GGUF of 4 GiB to FTW, beside copies of the same bytes.

Limit: the disk, which reading and writing share; the faster of two bare copies (`ftw.bench.copying`) reaches it. Peer:
the format's own library and FreeToken's writer. Every way syncs what it wrote, and all take turns. Peak memory is that
of a whole process, less what Python and the imports take.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ftw

from .checkpoints import write_dense_checkpoint, write_gguf_checkpoint
from .child import python_command
from .copying import copy_direct, copy_streaming
from .freetoken_writer import convert_as_freetoken, has_freetoken
from .timing import SET_CACHE, quantiles, time_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

NBYTES = 4 << 30
REPEATS = 5
_LIMITS = ("copy, O_DIRECT on both sides", "copy, buffered reads and O_DIRECT writes")
_PEAK = (
    "import resource; print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
)


def run(nbytes: int = NBYTES, repeats: int = REPEATS) -> dict[str, Any]:
    """Time each way, cold and warm; the last FTW of each format is verified against its source."""
    with tempfile.TemporaryDirectory(prefix="ftw-bench-", dir=Path.cwd()) as name:
        folder = Path(name)
        rows: list[dict[str, Any]] = []
        verified: dict[str, bool] = {}
        peaks: list[dict[str, Any]] = []
        sizes: dict[str, int] = {}
        for kind, write in {"safetensors": write_dense_checkpoint, "gguf": write_gguf_checkpoint}.items():
            source, target = folder / kind, folder / "target"
            write(source, nbytes)
            sizes[kind] = sum(path.stat().st_size for path in source.iterdir())
            for cache in SET_CACHE:
                rows += _time_ways(kind, source, target, cache, repeats, sizes[kind])
            peaks += _measure_peaks(kind, source, target)
            shutil.rmtree(target, ignore_errors=True)
            ftw.convert(source, target, embed="host")
            verified[kind] = ftw.verify(target, against=source).is_ok
            shutil.rmtree(source)
        return {"nbytes": sizes, "verified": verified, "rows": rows, "peak_memory": peaks}


def _time_ways(kind: str, source: Path, target: Path, cache: str, repeats: int, nbytes: int) -> list[dict[str, Any]]:
    ways: dict[str, Callable[[], object]] = {
        "ftw": lambda: ftw.convert(source, target, embed="host"),
        _LIMITS[0]: lambda: copy_direct(source, target),
        _LIMITS[1]: lambda: copy_streaming(source, target),
    }
    if has_freetoken():
        ways["library and FreeToken's writer"] = lambda: convert_as_freetoken(source, target)
    prepare = partial(_prepare, source, target, cache)
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, function in ways.items():
            samples[way].append(time_seconds(function, repeats=1, before=prepare).median)
    medians = {way: quantiles(times).median for way, times in samples.items()}
    limit = min(medians[way] for way in _LIMITS)
    return [
        {
            "source": kind,
            "cache": cache,
            "way": way,
            "seconds": round(median, 2),
            "gib_per_s": round(nbytes / median / (1 << 30), 2),
            "of_copy_limit": round(limit / median, 2),
        }
        for way, median in medians.items()
    ]


def _prepare(source: Path, target: Path, cache: str) -> None:
    shutil.rmtree(target, ignore_errors=True)
    SET_CACHE[cache](source)


def _measure_peaks(kind: str, source: Path, target: Path) -> list[dict[str, Any]]:
    """Return the peak of resident memory of each way, over that of a process that only imports."""
    ways = {"ftw": ("import ftw.cli.main as main", f"main.main(['convert', {str(source)!r}, {str(target)!r}])")}
    if has_freetoken():
        call = f"peer.convert_as_freetoken(pathlib.Path({str(source)!r}), pathlib.Path({str(target)!r}))"
        imports = "import pathlib, torch, gguf, safetensors, ftw.bench.freetoken_writer as peer; peer._load_module()"
        ways["library and FreeToken's writer"] = (imports, call)
    found = []
    for way, (imports, call) in ways.items():
        shutil.rmtree(target, ignore_errors=True)
        idle, peak = (_peak_mib(f"{imports}\n{body}") for body in ("", call))
        found.append({"source": kind, "way": way, "mib": peak, "mib_over_interpreter": peak - idle})
    return found


def _peak_mib(script: str) -> int:
    environment = {**os.environ, "MALLOC_ARENA_MAX": "2"}
    command = python_command(f"{script}\n{_PEAK}")
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return int(done.stdout.split()[-1]) >> 10
