"""Peak memory of the command, measured by the process itself: a checkpoint's size must not show in it."""

import json
import os
from pathlib import Path

import pytest
from peak_memory import peak_nbytes, write_sparse_file

LIMIT = 300 << 20
GIB = 1 << 30


def sparse_checkpoint(folder: Path, shapes: dict[str, tuple[int, int]]) -> Path:
    """One safetensors file of BF16 tensors whose data is a hole, but for a byte of each."""
    folder.mkdir()
    write_sparse_file(folder / "model.safetensors", ((name, "BF16", list(shape)) for name, shape in shapes.items()))
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    return folder


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
