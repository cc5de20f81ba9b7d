"""`ftw bench load`: one table out of safetensors and out of FTW into host memory, beside the safetensors library.

Limit: the disk, cold, and memcpy, warm. With a GPU the table is page-locked too, and the time includes that.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from safetensors import safe_open

import ftw

from .checkpoints import write_dense_checkpoint
from .timing import drop_from_page_cache, time_seconds

TABLE = "model.embed_tokens.weight"
NBYTES = 2 << 30
REPEATS = 5


def run(nbytes: int = NBYTES) -> dict[str, Any]:
    """Time loading the 0.58 GiB table of a checkpoint, cold and warm."""
    with tempfile.TemporaryDirectory(prefix="ftw-bench-", dir=Path.cwd()) as name:
        source, converted = Path(name) / "source", Path(name) / "converted"
        write_dense_checkpoint(source, nbytes)
        ftw.convert(source, converted, embed="host")
        shard = next(source.glob("*-00001-of-*.safetensors"))

        def peer() -> None:
            with safe_open(shard, framework="pt") as file:
                file.get_tensor(TABLE).clone()

        ways = {
            "ftw.load of FTW": lambda: ftw.load(converted, embed="host").close(),
            "ftw.load of safetensors": lambda: ftw.load(source, embed="host").close(),
            "safetensors get_tensor().clone()": peer,
        }
        rows = []
        for cache in ("cold", "warm"):
            for way, function in ways.items():
                function()
                before = (lambda: drop_from_page_cache(Path(name))) if cache == "cold" else (lambda: None)
                time = time_seconds(function, repeats=REPEATS, before=before)
                rows.append({"way": way, "cache": cache, "seconds": round(time.median, 3)})
        with ftw.open_checkpoint(converted) as checkpoint:
            return {"table_nbytes": checkpoint.tensors[TABLE].nbytes, "rows": rows}
