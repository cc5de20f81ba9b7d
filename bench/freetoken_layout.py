"""FreeToken's own converter and `ftw convert --layout freetoken`: time and memory, the same source, taking turns.

Run by hand, where FreeToken and a GPU are:

    python -m ftw.bench.freetoken_layout SOURCE WORK RESULT.json

Limit: the disk, or with everything in the page cache the writes. Memory is that of all processes of a way, sampled 20
times a second: what they have resident, how much of that is shared memory, and by how much /dev/shm grew. The last two
folders are compared tensor by tensor.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ftw

from .child import module_command, python_command
from .environment import describe_environment
from .timing import SET_CACHE

REPEATS = 3
_INTERVAL = 0.05
_FTW = "import sys; from ftw.cli.main import main; sys.exit(main(sys.argv[1:]))"
_FIELDS = {"VmRSS": "resident", "RssShmem": "shared"}


def run(source: Path, work: Path) -> dict[str, Any]:
    """Convert a source both ways, several times."""
    targets = {"ft checkpoint": work / "own", "ftw convert --layout freetoken": work / "ftw"}
    commands = {
        "ft checkpoint": module_command("freetoken.checkpoint", "--model", str(source), "--out", str(work / "own")),
        "ftw convert --layout freetoken": [
            *python_command(_FTW, "convert", str(source), str(work / "ftw")),
            *("--layout", "freetoken", "--embed", "host", "--progress", "none"),
        ],
    }
    rows: list[dict[str, Any]] = []
    for cache in ("warm", "cold"):
        for number in range(REPEATS):
            for way, command in commands.items():
                shutil.rmtree(targets[way], ignore_errors=True)
                SET_CACHE[cache](source)
                rows.append({"way": way, "cache": cache, "run": number, **_measure(command)})
    nbytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    return {"nbytes": nbytes, "rows": rows, "differing_tensors": _differences(*targets.values())}


def _measure(command: list[str]) -> dict[str, float]:
    """Run a command; return its seconds and the peaks of its memory in MiB."""
    shm_before = _shm_nbytes()
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    peaks = {"resident": 0, "shared": 0, "dev_shm": 0}
    while process.poll() is None:
        found = {**_memory_of_session(process.pid), "dev_shm": _shm_nbytes() - shm_before}
        peaks = {key: max(peak, found[key]) for key, peak in peaks.items()}
        time.sleep(_INTERVAL)
    seconds = time.monotonic() - began
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return {"seconds": round(seconds, 2), **{f"{key}_mib": round(peak / 2**20) for key, peak in peaks.items()}}


def _memory_of_session(session: int) -> dict[str, int]:
    """Return the bytes that all processes of a session have resident, and how many of those are shared memory."""
    found = dict.fromkeys(_FIELDS.values(), 0)
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if os.getsid(int(folder.name)) != session:
                continue
            lines = (folder / "status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        for key, value in (line.split(":", 1) for line in lines):
            if key in _FIELDS:
                found[_FIELDS[key]] += int(value.split()[0]) << 10
    return found


def _shm_nbytes() -> int:
    usage = os.statvfs("/dev/shm")
    return (usage.f_blocks - usage.f_bfree) * usage.f_frsize


def _differences(one: Path, other: Path) -> list[str]:
    """Return the names of tensors that two folders hold differently."""
    with ftw.open_checkpoint(one) as first, ftw.open_checkpoint(other) as second:
        differing = sorted(first.tensors.keys() ^ second.tensors.keys())
        for name in first.tensors.keys() & second.tensors.keys():
            tensors = first.tensors[name], second.tensors[name]
            if not tensors[0].is_alike(tensors[1]):
                differing.append(name)
                continue
            chunks = zip(first.iter_chunks(name), second.iter_chunks(name), strict=True)
            if any(bytes(left) != bytes(right) for left, right in chunks):
                differing.append(name)
        return differing


def main() -> None:
    """Measure, print and write the figures."""
    source, work, result = map(Path, sys.argv[1:4])
    figures = {"bench": "freetoken_layout", "environment": describe_environment(), **run(source, work)}
    result.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    for row in figures["rows"]:
        print(row)
    print("differing tensors:", figures["differing_tensors"])


if __name__ == "__main__":
    main()
