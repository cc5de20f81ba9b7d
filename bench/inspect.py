"""`ftw inspect`, whole processes by the wall clock: small and large headers, and a GGUF with a large vocabulary.

Limit: the start of the interpreter, which is timed beside it. Peers: the safetensors library listing the same names,
the gguf package's reader.
"""

from __future__ import annotations

import json
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .child import python_command
from .timing import quantiles

if TYPE_CHECKING:
    from collections.abc import Iterator

REPEATS, PEER_REPEATS = 9, 3
NUM_SHARDS = 2000
NUM_TOKENS = 250_000
_CONFIG = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 64}
# A process counts as its own peak what its parent held when it was forked, so a small one stands between.
_LAUNCHER = """
import resource, subprocess, sys, time
start = time.perf_counter()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
_STRING, _ARRAY = 8, 9  # GGUF's value types


def run() -> dict[str, Any]:
    """Time the command, a bare interpreter, and the peers on the same files."""
    with tempfile.TemporaryDirectory(prefix="ftw-bench-") as name:
        return {"rows": [_time(way, command, repeats) for way, command, repeats in _commands(Path(name))]}


def _commands(folder: Path) -> Iterator[tuple[str, list[str], int]]:
    yield "python -c pass", python_command("pass"), REPEATS
    inspect = python_command("from ftw.cli.main import run; run()", "inspect", "--json")
    for count in (20, 20_000, 100_000):
        source = folder / str(count)
        _write_tensors(source / "model.safetensors", count)
        yield f"ftw inspect, {count} tensors", [*inspect, str(source)], REPEATS
        listing = (
            f"from safetensors import safe_open\nwith safe_open({str(source / 'model.safetensors')!r}, 'np') as f:"
        )
        yield f"safe_open().keys(), {count} tensors", python_command(f"{listing} list(f.keys())"), REPEATS
    _write_shards(folder / "shards", 100_000)
    yield f"ftw inspect, 100000 tensors in {NUM_SHARDS} shards", [*inspect, str(folder / "shards")], REPEATS
    gguf = folder / "vocabulary.gguf"
    _write_gguf(gguf)
    yield f"ftw inspect, GGUF of {NUM_TOKENS} tokens and merges", [*inspect, str(gguf)], REPEATS
    reading = f"import gguf; gguf.GGUFReader({str(gguf)!r})"
    yield "gguf.GGUFReader, the same file", python_command(reading), PEER_REPEATS


def _time(way: str, command: list[str], repeats: int) -> dict[str, Any]:
    """Run a command a few times: median of seconds, and the most memory that it took."""
    runs = []
    for _ in range(repeats):
        launched = subprocess.run(python_command(_LAUNCHER, *command), check=True, capture_output=True, text=True)
        runs.append(tuple(map(float, launched.stdout.split())))
    seconds, peaks = zip(*runs, strict=True)
    return {"way": way, "seconds": round(quantiles(list(seconds)).median, 3), "peak_mib": round(max(peaks) / 1024, 1)}


def _write_tensors(path: Path, count: int, start: int = 0) -> list[str]:
    """Write a file of `count` tensors, the first of a checkpoint with the embedding; return their names."""
    path.parent.mkdir(exist_ok=True)
    entries, offset = {}, 0
    for number in range(start, start + count):
        name = f"model.layers.{number // 1000}.mlp.experts.{number % 1000}.down_proj.weight"
        dtype, shape, nbytes = ("BF16", [64, 8], 1024) if not number else ("F32", [1], 4)
        entries[name if number else "model.embed_tokens.weight"] = {
            "dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]
        }  # fmt: skip
        offset += nbytes
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(offset))
    (path.parent / "config.json").write_text(json.dumps(_CONFIG))
    return list(entries)


def _write_shards(folder: Path, count: int) -> None:
    weight_map: dict[str, str] = {}
    each = count // NUM_SHARDS
    for number in range(NUM_SHARDS):
        file = f"model-{number + 1:05}-of-{NUM_SHARDS:05}.safetensors"
        weight_map.update(dict.fromkeys(_write_tensors(folder / file, each, number * each), file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _write_gguf(path: Path) -> None:
    """Write a GGUF without tensors, with as many merges as tokens."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    def strings(key: str, values: Iterator[str]) -> bytes:
        return text(key) + struct.pack("<IIQ", _ARRAY, _STRING, NUM_TOKENS) + b"".join(map(text, values))

    keys = (
        text("general.architecture") + struct.pack("<I", _STRING) + text("llama"),
        strings("tokenizer.ggml.tokens", (f"token{number}" for number in range(NUM_TOKENS))),
        strings("tokenizer.ggml.merges", (f"to ken{number}" for number in range(NUM_TOKENS))),
    )
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys)) + b"".join(keys))
