"""Scale: as many tensors and shards as the largest checkpoints have. How long it takes is measured by `ftw bench`."""

import json
import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from builders import llama_config, safetensors_bytes, tensor_entry

import ftw

NUM_EXPERTS, NUM_TENSORS, NUM_SHARDS = 128, 100_000, 2_000
CONFIG = llama_config(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_experts=NUM_EXPERTS)
TABLE_BYTES, PART_BYTES = 64 * 8 * 2, 8 * 8 * 2


def shapes() -> Iterator[tuple[str, list[int]]]:
    """Yield the tensors of an endless MoE model: its head and its table first, then experts."""
    yield from {"lm_head.weight": [64, 8], "model.embed_tokens.weight": [64, 8], "model.norm.weight": [8]}.items()
    layer = 0
    while True:
        for expert in range(NUM_EXPERTS):
            for part in ("gate", "up", "down"):
                yield f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight", [8, 8]
        layer += 1


def write_shard(path: Path, tensors: list[tuple[str, list[int]]]) -> None:
    """Write a header before a hole; the first byte keeps the head from equalling the table."""
    header, end = {}, 0
    for name, shape in tensors:
        nbytes = 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name] = tensor_entry("BF16", shape, end, end + nbytes)
        end += nbytes
    file = safetensors_bytes(header, b"\1")
    path.write_bytes(file)
    os.truncate(path, len(file) - 1 + end)


def assert_counted(report: dict[str, Any]) -> None:
    nbytes = 2 * TABLE_BYTES + 16 + (NUM_TENSORS - 3) * PART_BYTES
    assert (report["num_tensors"], report["nbytes"], report["dtypes"]) == (NUM_TENSORS, nbytes, {"BF16": nbytes})
    [table] = report["tables"]
    assert (table["name"], table["rows"], table["reason"]) == ("model.embed_tokens.weight", 64, "ok")
    assert report["tied"]["value"] is False
    assert report["gain"]["expert_slot_bytes"] == 3 * PART_BYTES
    assert report["gain"]["expert_slots"] == TABLE_BYTES // (3 * PART_BYTES)
    assert report["budget"]["expert_bytes"] == (NUM_TENSORS - 3) * PART_BYTES
    assert report["budget"]["weights_bytes"] == TABLE_BYTES + 16
    assert (report["warnings"], report["left_out"]) == ([], [])


@pytest.fixture(autouse=True)
def a_minute_of_work() -> Iterator[None]:
    """End with less than a minute of the processor's time, which a busy machine does not make longer."""
    began = time.process_time()
    yield
    assert time.process_time() - began < 60


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_header_of_100_000_tensors_is_counted(folder: Path) -> None:
    write_shard(folder / "model.safetensors", list(islice(shapes(), NUM_TENSORS)))
    assert_counted(ftw.inspect(folder, vram_bytes=1 << 30).to_dict())


def test_index_of_2_000_shards_is_counted(folder: Path) -> None:
    tensors, weight_map = shapes(), {}
    for number in range(1, NUM_SHARDS + 1):
        name = f"model-{number:05}-of-{NUM_SHARDS:05}.safetensors"
        part = list(islice(tensors, NUM_TENSORS // NUM_SHARDS))
        write_shard(folder / name, part)
        weight_map.update(dict.fromkeys((tensor for tensor, _ in part), name))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_counted(ftw.inspect(folder, vram_bytes=1 << 30).to_dict())
    with ftw.open_checkpoint(folder) as checkpoint:
        assert len(checkpoint.files) == NUM_SHARDS
        last = checkpoint.tensors[next(reversed(weight_map))]
        checkpoint.read_into(last.name, bytearray(last.nbytes))


def test_table_of_20_000_shards_is_one_table(folder: Path) -> None:
    """Far more than Qwen4's 512, in the order of their names, which is not that of their numbers."""
    path = "model.layers.0.ple.ple_embedding.ngram_embedding"
    shards = [(f"{path}.shard_{number}.weight", [8, 8]) for number in range(20_000)]
    write_shard(folder / "model.safetensors", [*islice(shapes(), 3), *sorted(shards)])
    _, table = ftw.inspect(folder).verdict.tables
    assert (table.name, table.rows, table.eligible) == (path, 8 * len(shards), True)
    assert table.tensors == tuple(name for name, _ in shards)
