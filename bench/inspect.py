"""`ftw inspect`, whole processes by the wall clock, on a small checkpoint and on one of 20,000 tensors.

Limit: the start of the interpreter, which is timed beside it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .timing import time_seconds

REPEATS = 9


def run() -> dict[str, Any]:
    """Time the command, a bare interpreter, and the safetensors library listing the same names."""
    with tempfile.TemporaryDirectory(prefix="ftw-bench-") as name:
        files = {}
        for count in (20, 20_000):
            files[count] = Path(name) / f"{count}" / "model.safetensors"
            files[count].parent.mkdir()
            _write_many_tensors(files[count], count)
        commands = {"python -c pass": [sys.executable, "-c", "pass"]}
        for count, file in files.items():
            inspect = [sys.executable, "-m", "ftw.cli", "inspect", str(file.parent), "--json"]
            commands[f"ftw inspect, {count} tensors"] = inspect
            listing = f"from safetensors import safe_open\nwith safe_open({str(file)!r}, 'np') as f: list(f.keys())"
            commands[f"safe_open().keys(), {count} tensors"] = [sys.executable, "-c", listing]
        rows = []
        for way, command in commands.items():

            def call(command: list[str] = command) -> None:
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

            time = time_seconds(call, repeats=REPEATS, before=lambda: None)
            rows.append({"way": way, "seconds": round(time.median, 3)})
        return {"rows": rows}


def _write_many_tensors(path: Path, count: int) -> None:
    entries = {"model.embed_tokens.weight": {"dtype": "BF16", "shape": [64, 8], "data_offsets": [0, 1024]}}
    for number in range(1, count):
        offsets = [1024 + 4 * (number - 1), 1024 + 4 * number]
        name = f"model.layers.{number // 100}.mlp.experts.{number % 100}.down_proj.weight"
        entries[name] = {"dtype": "F32", "shape": [1], "data_offsets": offsets}
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(1024 + 4 * (count - 1)))
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 64}
    (path.parent / "config.json").write_text(json.dumps(config))
