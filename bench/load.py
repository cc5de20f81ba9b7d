"""`ftw bench load`: a table into host memory, and all weights onto the device, beside the best ways there are.

Limits: the disk around the page cache, cold, and memcpy out of it, warm, each straight into huge pages by as many
threads as ftw takes; on a GPU with the memory page-locked at the end, as ftw's is. Peer: the safetensors library.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

import ftw
from ftw.files import default_num_threads
from ftw.host import address_of
from ftw.pinned import load_driver

from .checkpoints import TABLE, write_dense_checkpoint, write_table_checkpoints
from .host_memory import measure_loading, measure_offload, measure_sharing, peak_of
from .reading import read_buffered, read_direct_window
from .timing import SET_CACHE, time_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, COLUMNS = 262_144, 2048  # 1 GiB in bf16
NBYTES = 2 << 30
REPEATS = 5
_PEAK = """
import sys, torch, ftw
from safetensors import safe_open
what, path, table = sys.argv[1:]
def resident(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key + ":")) * 1024
before = resident("VmRSS")
if what == "ftw":
    model = ftw.load(path, embed="host", device="cpu")
else:
    with safe_open(path + "/model.safetensors", framework="pt") as file:
        tensor = file.get_tensor(table).clone()
print(resident("VmHWM") - before)
"""


def run(rows: int = ROWS, columns: int = COLUMNS, nbytes: int = NBYTES) -> dict[str, Any]:
    """Time loading a 1 GiB table out of each format, and all of a checkpoint; measure memory; offload and share."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory(prefix="ftw-bench-", dir=Path.cwd()) as name:
        paths = write_table_checkpoints(Path(name) / "table", rows, columns)
        result: dict[str, Any] = {"table_nbytes": rows * columns * 2, "num_threads": default_num_threads()}
        result["table"] = _time_table(paths, device)
        result["peak"] = [
            {"way": way, "peak_mib": round(peak_of(_PEAK, what, str(paths["safetensors"]), TABLE), 1)}
            for what, way in (("ftw", "ftw.load of safetensors"), ("clone", "safetensors get_tensor().clone()"))
        ]
        result["memory"] = measure_loading(paths, device)
        result["sharing"] = measure_sharing(paths["ftw"], device)
        if device == "cuda":
            result["offload"] = measure_offload(rows, columns, device)
    with tempfile.TemporaryDirectory(prefix="ftw-bench-", dir=Path.cwd()) as name:
        result["all"] = _time_all(Path(name), nbytes, device)
    return result


def _time_table(paths: dict[str, Path], device: str) -> list[dict[str, Any]]:
    file = paths["safetensors"] / "model.safetensors"
    with ftw.open_checkpoint(paths["safetensors"]) as checkpoint:
        table = checkpoint.tensors[TABLE]
    where = (file, table.offset, table.nbytes, default_num_threads())
    ways: dict[str, Callable[[], object]] = {
        "O_DIRECT, its blocks into huge pages": lambda: _page_lock(read_direct_window(*where), device),
        "buffered into huge pages": lambda: _page_lock(read_buffered(*where), device),
        **{f"ftw.load of {name}": partial(_load_table, path, device) for name, path in paths.items()},
        "safetensors get_tensor().clone()": partial(_clone_table, file),
    }
    if device != "cpu":
        ways["safetensors get_tensor().pin_memory()"] = partial(_pin_table, file)
    rows = []
    for cache, prepare in SET_CACHE.items():
        samples: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(REPEATS):
            for way, function in ways.items():
                prepare(file.parent.parent)
                start = time.perf_counter()
                function()
                samples[way].append(time.perf_counter() - start)
        medians = {way: statistics.median(times) for way, times in samples.items()}
        best = min(list(medians.values())[:2])
        rows += [
            {"way": way, "cache": cache, "seconds": round(seconds, 3), "of_best": round(seconds / best, 2)}
            for way, seconds in medians.items()
        ]
    return rows


def _page_lock(view: memoryview, device: str) -> None:
    """Do to what was read what a GPU needs."""
    if device == "cpu":
        return
    torch.cuda.synchronize()  # makes the context current
    driver = load_driver()
    start = address_of(view) // 4096 * 4096
    if driver.register(start, -(-(address_of(view) + len(view) - start) // 4096) * 4096):
        raise RuntimeError("the driver refused to page-lock a table")
    driver.unregister(start)


def _load_table(path: Path, device: str) -> None:
    ftw.load(path, embed="host", device=device).close()


def _clone_table(file: Path) -> None:
    with safe_open(file, framework="pt") as opened:
        opened.get_tensor(TABLE).clone()


def _pin_table(file: Path) -> None:
    """Do what others do to have a table page-locked; torch keeps the memory, so it is asked to give it back."""
    with safe_open(file, framework="pt") as opened:
        pinned = opened.get_tensor(TABLE).pin_memory()
    del pinned
    empty = getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()


def _time_all(folder: Path, nbytes: int, device: str) -> list[dict[str, Any]]:
    source, converted = folder / "source", folder / "converted"
    write_dense_checkpoint(source, nbytes)
    ftw.convert(source, converted, embed="host")
    shards = sorted(source.glob("*.safetensors"))
    ways: dict[str, Callable[[], None]] = {
        "ftw weights() of FTW": partial(_load_all, converted, device),
        "ftw weights() of safetensors": partial(_load_all, source, device),
        "safetensors load_file()": partial(_load_files, shards, device),
    }
    rows = []
    for way, function in ways.items():
        for cache, prepare in SET_CACHE.items():
            time = time_seconds(function, repeats=REPEATS, before=partial(prepare, folder))
            rows.append({"way": way, "cache": cache, "seconds": round(time.median, 3)})
    return rows


def _load_all(path: Path, device: str) -> None:
    with ftw.load(path, embed="gpu", device=device) as model:
        weights = dict(model.weights())
        _synchronize(device)
        del weights


def _load_files(shards: list[Path], device: str) -> None:
    weights = [load_file(shard, device=device) for shard in shards]
    if device == "cpu":  # there the library maps the file; touching every page is part of loading
        weights = [{name: tensor.clone() for name, tensor in file.items()} for file in weights]
    _synchronize(device)


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
