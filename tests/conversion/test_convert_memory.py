"""Peak memory of the command, measured by the process itself: a checkpoint's size must not show in it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders import safetensors_bytes, tensor_entry

LIMIT = 300 << 20
GIB = 1 << 30

# Runs the command line and prints the peak of its resident memory, in KiB, as the last line of stderr.
MEASURE = """
import resource, sys
from ftw.cli.main import main
status = main(sys.argv[1:]) if len(sys.argv) > 1 else 0
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(peak, file=sys.stderr)
sys.exit(status)
"""


def sparse_checkpoint(folder: Path, shapes: dict[str, tuple[int, int]]) -> Path:
    """One safetensors file of BF16 tensors whose data is a hole, but for a few bytes of each."""
    header, position, places = {}, 0, []
    for name, (rows, columns) in shapes.items():
        nbytes = 2 * rows * columns
        header[name] = tensor_entry("BF16", [rows, columns], position, position + nbytes)
        places.append(position + nbytes // 2)
        position += nbytes
    start = safetensors_bytes(header)
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(start)
        for number, place in enumerate(places):
            file.seek(len(start) + place)
            file.write(bytes([number % 255 + 1]))
        file.truncate(len(start) + position)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    return folder


def peak_nbytes(*arguments: object) -> int:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=3000,
        env={**os.environ, "MALLOC_ARENA_MAX": "2"},
    )
    assert done.returncode == 0, done.stderr
    return int(done.stderr.split()[-1]) << 10


SHAPES = {
    "one_tensor_of_1_gib": {"model.embed_tokens.weight": (1 << 17, 1 << 12)},
    "many_tensors_of_12_mib": {
        "model.embed_tokens.weight": (1 << 15, 1 << 10),
        "lm_head.weight": (1 << 15, 1 << 10),
        **{f"model.layers.{number}.mlp.up_proj.weight": (6 << 10, 1 << 10) for number in range(90)},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_convert_and_verify_memory_does_not_grow_with_the_checkpoint(tmp_path, shapes):
    source = sparse_checkpoint(tmp_path / "src", shapes)
    assert (source / "model.safetensors").stat().st_size >= GIB
    idle = peak_nbytes()
    try:
        converted = peak_nbytes("convert", source, tmp_path / "out", "--shard-size", "512MiB")
        verified = peak_nbytes("verify", tmp_path / "out", "--against", source)
        inspected = peak_nbytes("inspect", tmp_path / "out")
    finally:  # pytest keeps the folders of three runs
        for path in (tmp_path / "out").glob("*.ftw"):
            os.truncate(path, 0)
    assert converted - idle < LIMIT
    assert verified - idle < LIMIT
    assert inspected - idle < 32 << 20


def test_convert_and_verify_memory_is_bounded_for_many_tensors(tmp_path):
    count = 100_000
    names = [f"model.layers.{number // 400}.mlp.experts.{number % 400}.up_proj.weight" for number in range(count)]
    source = sparse_checkpoint(tmp_path / "src", {"model.embed_tokens.weight": (64, 8)} | dict.fromkeys(names, (0, 8)))
    idle = peak_nbytes()
    assert peak_nbytes("convert", source, tmp_path / "out") - idle < LIMIT
    assert peak_nbytes("verify", tmp_path / "out", "--against", source) - idle < LIMIT
