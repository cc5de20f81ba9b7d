"""`ftw bench convert`: a sharded 4 GiB safetensors checkpoint to FTW, cold and warm, beside a plain copy of its bytes.

Limit: the disk, which reading and writing share. The copy reads and writes through the page cache in 16 MiB pieces and
syncs; the peer reads every tensor through the safetensors library and appends it to one file, and syncs too.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

import ftw

from .checkpoints import write_dense_checkpoint
from .timing import SET_CACHE, time_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

NBYTES = 4 << 30
REPEATS = 3


def run(nbytes: int = NBYTES) -> dict[str, Any]:
    """Time each way three times, cold and warm; the last FTW is verified against its source."""
    with tempfile.TemporaryDirectory(prefix="ftw-bench-", dir=Path.cwd()) as name:
        folder = Path(name)
        source, target = folder / "source", folder / "target"
        write_dense_checkpoint(source, nbytes)
        size = sum(path.stat().st_size for path in source.iterdir())
        ways: dict[str, Callable[[], object]] = {
            "ftw": lambda: ftw.convert(source, target, embed="host"),
            "copy": lambda: _copy(source, target),
            "safetensors_and_append": lambda: _append(source, target),
        }
        rows = []
        for cache in SET_CACHE:
            for way, function in ways.items():
                time = time_seconds(function, repeats=REPEATS, before=partial(_prepare, source, target, cache))
                rate = round(size / time.median / (1 << 30), 2)
                rows.append({"way": way, "cache": cache, "seconds": round(time.median, 2), "gib_per_s": rate})
        _prepare(source, target, "warm")
        ftw.convert(source, target, embed="host")
        return {"nbytes": size, "verified": ftw.verify(target, against=source).is_ok, "rows": rows}


def _prepare(source: Path, target: Path, cache: str) -> None:
    shutil.rmtree(target, ignore_errors=True)
    SET_CACHE[cache](source)


def _copy(source: Path, target: Path) -> None:
    target.mkdir()
    for path in source.iterdir():
        with path.open("rb") as reading, (target / path.name).open("wb") as writing:
            shutil.copyfileobj(reading, writing, 16 << 20)
            writing.flush()
            os.fsync(writing.fileno())


def _append(source: Path, target: Path) -> None:
    target.mkdir()
    with (target / "all").open("wb") as writing:
        for path in sorted(source.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    writing.write(file.get_tensor(name).contiguous().view(-1).view(torch.uint8).numpy())
        writing.flush()
        os.fsync(writing.fileno())
