"""Tables in host memory, on a GPU or without one: what loading, offloading and sharing a table cost.

Limits: the copy engine, device to host, for `ftw.offload`; one copy of the table for `share="node"`.
"""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

import ftw
from ftw.offloading import copy_to_host
from ftw.pinned import PinnedBuffer

from .child import python_command

MIB = 1 << 20
_MEASURE_LOAD = """
import sys, threading, torch, ftw
path, device = sys.argv[1:]
if device != "cpu":
    ftw.load(path, embed="gpu", device=device).close()
    torch.zeros(1, device=device)
    torch.cuda.synchronize()
free, end = [], threading.Event()
def poll():
    while not end.wait(0.001):
        free.append(torch.cuda.mem_get_info()[0])
def resident(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key + ":")) * 1024
thread = threading.Thread(target=poll)
if device != "cpu":
    free.append(torch.cuda.mem_get_info()[0])
    thread.start()
before = resident("VmRSS")
with ftw.load(path, embed="host", device=device) as model:
    end.set()
    print(max(free, default=0) - min(free, default=0), model.memory.peak.device_allocated - model.memory.before.
          device_allocated, resident("VmHWM") - before, model.memory.total_pinned_bytes)
"""
_SHARE = """
import sys, time, torch, ftw
path, device = sys.argv[1:]
if device != "cpu":
    torch.zeros(1, device=device)
start = time.perf_counter()
model = ftw.load(path, embed="host", device=device, share="node")
print(time.perf_counter() - start, flush=True)
sys.stdin.readline()
print(model.embedding(torch.arange(0, 8192, 7, device=device)).double().sum().item(), flush=True)
sys.stdin.readline()
model.close()
"""


def measure_loading(paths: dict[str, Path], device: str) -> list[dict[str, Any]]:
    """Measure the growth of device and host memory while a table is loaded, of each format, in processes of their own.

    Loading the CUDA context comes before; the device's free memory is polled every millisecond.
    """
    rows = []
    for name, path in paths.items():
        output = _run([_MEASURE_LOAD, str(path), device])
        device_nbytes, allocated, host, pinned = map(int, output.split())
        rows.append(
            {
                "format": name,
                "device_growth_mib": round(device_nbytes / MIB, 2),
                "allocator_growth_mib": round(allocated / MIB, 2),
                "host_growth_mib": round(host / MIB, 1),
                "pinned_bytes": pinned,
            }
        )
    return rows


def measure_offload(rows: int, columns: int, device: str) -> list[dict[str, Any]]:
    """Time `ftw.offload` of a bf16 table, all of it and the copying alone, beside the copy engine."""
    samples: list[tuple[float, float, float, int]] = []
    for _ in range(3):
        module = torch.nn.Embedding(rows, columns, dtype=torch.bfloat16, device=device).requires_grad_(False)
        nbytes = module.weight.nbytes
        limit, copying = _time_copies(module.weight.detach())
        start = time.perf_counter()
        embedding = ftw.offload(module)
        whole = time.perf_counter() - start
        assert embedding.memory is not None
        samples.append((nbytes / limit / 1e9, nbytes / copying / 1e9, whole, embedding.memory.freed_bytes))
        embedding.close()
    engine, speed, whole, freed = (sorted(values)[1] for values in zip(*samples, strict=True))
    return [
        {
            "table_mib": round(nbytes / MIB),
            "copy_engine_gb_s": round(engine, 1),
            "offload_copy_gb_s": round(speed, 1),
            "offload_seconds": round(whole, 3),
            "freed_mib": round(freed / MIB, 1),
        }
    ]


def measure_sharing(path: Path, device: str) -> list[dict[str, Any]]:
    """Load a table in two processes with `share="node"`: seconds of each, proportional memory of both, equal rows."""
    processes = [_start([_SHARE, str(path), device])]
    seconds = [float(_line(processes[0]))]
    processes.append(_start([_SHARE, str(path), device]))
    seconds.append(float(_line(processes[1])))
    proportional = sum(_proportional_nbytes(process.pid) for process in processes)
    for process in processes:
        _tell(process)
    sums = {_line(process) for process in processes}
    for process in processes:
        _tell(process)
        process.wait()
    if len(sums) != 1:
        raise RuntimeError(f"processes that share a table look up different rows: {sums}")
    return [
        {
            "processes": len(processes),
            "first_seconds": round(seconds[0], 3),
            "second_seconds": round(seconds[1], 3),
            "proportional_mib": round(proportional / MIB, 1),
        }
    ]


def peak_of(script: str, *arguments: str) -> float:
    """Run a script in a process of its own that prints by how many bytes its peak memory grew; return MiB."""
    return int(_run([script, *arguments])) / MIB


def _run(arguments: list[str]) -> str:
    result = subprocess.run(python_command(*arguments), stdout=subprocess.PIPE, text=True, check=True)
    return result.stdout


def _start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(python_command(*arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def _tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def _proportional_nbytes(pid: int) -> int:
    """Return a process's share of the pages of segments, each divided by how many map it."""
    with open(f"/proc/{pid}/smaps", encoding="utf-8", errors="replace") as file:
        entries = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", file.read())
    shared = (entry for entry in entries if " /dev/shm/" in entry.partition("\n")[0])
    return sum(int(kib) * 1024 for entry in shared for kib in re.findall(r"(?m)^Pss:\s+(\d+) kB$", entry))


def _time_copies(table: torch.Tensor) -> tuple[float, float]:
    """Return the seconds that one copy to page-locked memory takes, and those of the chunks of `ftw.offload`."""
    with PinnedBuffer(table.nbytes) as buffer:
        host = torch.frombuffer(buffer.view(), dtype=torch.uint8).view(table.dtype).reshape(table.shape)
        buffer.pin(table.device)
        seconds = []
        for copy in (lambda: host.copy_(table, non_blocking=True), lambda: copy_to_host(table, host)):
            torch.cuda.synchronize()
            start = time.perf_counter()
            copy()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    return seconds[0], seconds[1]
