"""Peak memory of the command line, measured by its process, and weight files that are holes but for a few bytes."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from builders import safetensors_bytes, tensor_entry

# Runs the command line and prints the peak of its resident memory, in KiB, as the last line of stderr.
MEASURE = """
import sys
from ftw.cli.main import main
status = main(sys.argv[1:]) if len(sys.argv) > 1 else 0
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(peak, file=sys.stderr)
sys.exit(status)
"""


def write_sparse_file(path: Path, tensors: Iterable[tuple[str, str, list[int]]]) -> None:
    """Write a safetensors file of tensors of 2-byte elements: name, type, shape. Each is a hole, but for a byte."""
    header, places, position = {}, [], 0
    for name, dtype, shape in tensors:
        nbytes = 2
        for size in shape:
            nbytes *= size
        header[name] = tensor_entry(dtype, shape, position, position + nbytes)
        places.append(position + nbytes // 2)
        position += nbytes
    start = safetensors_bytes(header)
    with path.open("wb") as file:
        file.write(start)
        for number, place in enumerate(places):
            file.seek(len(start) + place)
            file.write(bytes([number % 255 + 1]))
        file.truncate(len(start) + position)


def peak_nbytes(*arguments: object) -> int:
    """Run the command line, or without arguments import it alone; return the most that was resident."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=3000,
        env={**os.environ, "MALLOC_ARENA_MAX": "2"},
    )
    assert done.returncode == 0, done.stderr
    return int(done.stderr.split()[-1]) << 10
