"""Small checkpoints of the families that FreeToken serves: names, types, shapes and configurations as files have them.

What a source holds is in tests/data/freetoken-families/NAME.json: its files that are no weights, and each tensor's
type, shape and file. The bytes are made here, the same ones each time.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from builders import safetensors_bytes, tensor_entry
from places import DATA

FOLDER = DATA / "freetoken-families"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
_DTYPES = {"F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "u1", "I8": "i1"}


def read_spec(name: str) -> dict[str, Any]:
    """Return `files`, by path, and `tensors`: type, shape and file by name."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def write_source(name: str, folder: Path) -> Path:
    """Write the source of that name."""
    return write_spec(read_spec(name), folder)


def write_spec(spec: dict[str, Any], folder: Path) -> Path:
    """Write a source of a spec, with an index where it has several weight files."""
    for path, content in spec["files"].items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(json.dumps(content), encoding="utf-8")
    shards: dict[str, dict[str, Any]] = {}
    for name, (dtype, shape, shard) in spec["tensors"].items():
        shards.setdefault(shard, {})[name] = (dtype, shape, make_bytes(name, dtype, shape))
    for shard, tensors in shards.items():
        header, body = {}, b""
        for name, (dtype, shape, content) in tensors.items():
            header[name] = tensor_entry(dtype, shape, len(body), len(body) + len(content))
            body += content
        (folder / shard).write_bytes(safetensors_bytes(header, body))
    if len(shards) > 1 or shards.keys() != {"model.safetensors"}:
        index = {"metadata": {}, "weight_map": {name: shard for name, (*_, shard) in spec["tensors"].items()}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def make_bytes(name: str, dtype: str, shape: list[int]) -> bytes:
    """Return a tensor's bytes, made of its name: finite numbers of the size that weights and scales have."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    count = int(np.prod(shape, dtype=np.int64))
    if dtype == "BF16":
        floats = generator.normal(0, 0.05, count).astype(np.float32)
        return (floats.view(np.uint32) >> 16).astype("<u2").tobytes()
    if dtype in ("F32", "F16"):
        return np.abs(generator.normal(0.5, 0.2, count)).astype(_DTYPES[dtype]).tobytes()
    if dtype == "F8_E4M3":
        codes = generator.integers(0, 127, count) | generator.integers(0, 2, count) << 7
        return codes.astype(np.uint8).tobytes()  # never 127 or 255, which are NaN
    if dtype == "F8_E8M0":
        return generator.integers(118, 132, count).astype(np.uint8).tobytes()
    most = 4 if dtype in ("I64", "I32") else 127
    return generator.integers(0, most, count).astype(_DTYPES[dtype]).tobytes()
