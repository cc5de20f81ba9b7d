"""`ftw bench load`: a table into host memory, and all weights onto the device, beside the safetensors library.

Limit: the disk, cold, and memcpy, warm. With a GPU ftw's time includes page-locking the table, which the library's copy
is not.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

import ftw

from .checkpoints import write_dense_checkpoint
from .timing import SET_CACHE, time_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

TABLE = "model.embed_tokens.weight"
NBYTES = 2 << 30
REPEATS = 5


def run(nbytes: int = NBYTES) -> dict[str, Any]:
    """Time loading the 0.58 GiB table of a checkpoint, and all of the checkpoint, cold and warm."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory(prefix="ftw-bench-", dir=Path.cwd()) as name:
        source, converted = Path(name) / "source", Path(name) / "converted"
        write_dense_checkpoint(source, nbytes)
        ftw.convert(source, converted, embed="host")
        rows = []
        for (what, way), function in _ways(source, converted, device).items():
            for cache, prepare in SET_CACHE.items():
                time = time_seconds(function, repeats=REPEATS, before=partial(prepare, Path(name)))
                rows.append({"what": what, "way": way, "cache": cache, "seconds": round(time.median, 3)})
        with ftw.open_checkpoint(converted) as checkpoint:
            return {"nbytes": checkpoint.nbytes, "table_nbytes": checkpoint.tensors[TABLE].nbytes, "rows": rows}


def _ways(source: Path, converted: Path, device: str) -> dict[tuple[str, str], Callable[[], None]]:
    shards = sorted(source.glob("*.safetensors"))
    return {
        ("table", "ftw.load of FTW"): partial(_load_table, converted),
        ("table", "ftw.load of safetensors"): partial(_load_table, source),
        ("table", "safetensors get_tensor().clone()"): partial(_clone_table, shards[0]),
        ("all", "ftw weights() of FTW"): partial(_load_all, converted, device),
        ("all", "ftw weights() of safetensors"): partial(_load_all, source, device),
        ("all", "safetensors load_file()"): partial(_load_files, shards, device),
    }


def _load_table(path: Path) -> None:
    ftw.load(path, embed="host").close()


def _clone_table(shard: Path) -> None:
    with safe_open(shard, framework="pt") as file:
        file.get_tensor(TABLE).clone()


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
