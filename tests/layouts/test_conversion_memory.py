"""Peak memory of `ftw convert --layout freetoken`, measured by the process itself: experts must not show in it."""

import json
import os
from pathlib import Path

import pytest
from arrangements import change
from peak_memory import peak_nbytes, write_sparse_file

MIB = 1 << 20
LIMIT = 200 * MIB  # 94 and 147 MiB were measured (2 cores, 2026-12-01)
WIDTH = 1 << 17  # of an expert: 16 MiB for each of its matrices


def widen(_spec, config, tensors):
    """Make each routed expert `WIDTH` wide: [I, H] and [H, I] by itself, [H, 2I] and [I, H] among all of a layer."""
    text = config.get("text_config", config)
    hidden, text["moe_intermediate_size"] = text["hidden_size"], WIDTH
    for name in [name for name in tensors if ".experts." in name]:
        stored, is_down = tensors[name], "down_proj" in name
        if len(stored[1]) == 2:
            stored[1] = [hidden, WIDTH] if is_down else [WIDTH, hidden]
        else:
            stored[1] = [stored[1][0], *([WIDTH, hidden] if is_down else [hidden, 2 * WIDTH])]


def write_sparse(spec, folder: Path) -> Path:
    """Write a source whose weights are holes, but for a byte of each tensor."""
    folder.mkdir()
    tensors = ((name, dtype, shape) for name, (dtype, shape, _) in spec["tensors"].items())
    write_sparse_file(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(spec["files"]["config.json"]))
    return folder


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads the peak from /proc")
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_vl_moe"], ids=["by expert", "stacked and swapped"])
def test_memory_does_not_grow_with_the_experts(tmp_path, name):
    source = write_sparse(change(name, widen), tmp_path / "src")
    assert (source / "model.safetensors").stat().st_size > 300 * MIB
    idle = peak_nbytes()
    try:
        converted = peak_nbytes("convert", source, tmp_path / "out", "--layout", "freetoken", "--embed", "gpu")
        verified = peak_nbytes("verify", tmp_path / "out", "--against", source)
    finally:  # pytest keeps the folders of three runs
        for path in (tmp_path / "out").glob("*.ftw"):
            os.truncate(path, 0)
    assert converted - idle < LIMIT
    assert verified - idle < LIMIT
