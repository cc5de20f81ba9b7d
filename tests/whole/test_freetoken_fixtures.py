"""FTW folders that FreeToken's own code wrote, kept in data/freetoken-VERSION/: opened, verified, loaded, made anew.

`data/make_freetoken_fixtures.py` made them and says how. The bytes of a tensor are SHAKE-128 of its name, so what each
must hold is known without FreeToken. Nothing here needs its wheel.
"""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import pytest
import torch
from places import DATA

import ftw
from ftw.dtypes import DTYPES

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NGRAM = "model.layers.1.ple.ple_embedding.ngram_embedding"
LAYER = "model.layers.0"
ROWS = 21  # of the GGUFs' tables

PLAIN = {
    TABLE: ("BF16", (64, 8)),
    f"{LAYER}.self_attn.qkv_proj.weight": ("BF16", (160, 32)),
    f"{LAYER}.self_attn.qkv_proj.input_scale": ("F32", ()),
    HEAD: ("BF16", (64, 8)),
}
FURTHER = {
    f"{LAYER}.mlp.down_proj.weight": ("F8_E4M3", (8, 128)),
    f"{LAYER}.mask": ("BOOL", (33,)),
    f"{LAYER}.offsets": ("I64", (5,)),
}
FLAT = {
    TABLE: ("BF16", (64, 8)),
    f"{LAYER}.mlp.gate.weight": ("F32", (3, 8)),
    HEAD: ("BF16", (64, 8)),
    "gate_up": ("U8", (12, 16, 4)),
    "down": ("U8", (12, 8, 4)),
    "gate_up_alpha": ("F32", (12,)),
    "down_alpha": ("F32", (12,)),
}
PER_LAYER = {
    TABLE: ("BF16", (64, 8)),
    **{f"gate_up#L0000{layer}": ("BF16", (3, 16, 8)) for layer in range(4)},
    "down#L00003": ("BF16", (3, 8, 8)),
    **{f"{NGRAM}.shard_{number}.weight": ("BF16", (16, 8)) for number in range(2)},
}


class Folder(NamedTuple):
    """What a folder holds, and what is said of its tables: name to reason."""

    tensors: dict[str, tuple[str, tuple[int, ...]]]
    tables: dict[str, str]


FOLDERS = {
    "0.1.2/plain": Folder(PLAIN, {TABLE: "ok"}),
    "0.1.2/gguf": Folder({"model.embed_tokens.qweight": ("U8", (21, 210))}, {"model.embed_tokens.qweight": "tied"}),
    "0.2.1/plain": Folder({**PLAIN, **FURTHER}, {TABLE: "ok"}),
    "0.2.1/banks-flat": Folder(FLAT, {TABLE: "ok"}),
    "0.2.1/banks-layer": Folder(PER_LAYER, {TABLE: "tied", NGRAM: "ok"}),
    "0.2.1/gguf": Folder({TABLE: ("U8", (28, 68)), HEAD: ("U8", (28, 68))}, {TABLE: "ok"}),
}
SOURCE_NAMES = {"model.embed_tokens.qweight": "token_embd.weight", TABLE: "token_embd.weight", HEAD: "output.weight"}

every_folder = pytest.mark.parametrize("name", FOLDERS)


def folder_of(name: str) -> Path:
    version, kind = name.split("/")
    return DATA / f"freetoken-{version}" / kind


def expected_bytes(name: str, tensor: str) -> bytes:
    """Return what a tensor of a folder has to hold."""
    dtype, shape = FOLDERS[name].tensors[tensor]
    count = int(np.prod(shape))
    if name.endswith("gguf"):  # rows of the source, then FreeToken's rows of zeros
        stored = hashlib.shake_128(SOURCE_NAMES[tensor].encode()).digest(ROWS * shape[1])
        return stored + bytes(count - len(stored))
    content = hashlib.shake_128(tensor.encode()).digest(count * DTYPES[dtype].bits // 8)
    return bytes(byte & 1 for byte in content) if dtype == "BOOL" else content


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_holds_what_was_written(folder: Path, name: str) -> None:
    with ftw.open_checkpoint(folder) as checkpoint:
        assert {key: (tensor.dtype, tensor.shape) for key, tensor in checkpoint.tensors.items()} == FOLDERS[
            name
        ].tensors
        for tensor in checkpoint.tensors.values():
            found = bytearray(tensor.nbytes)
            checkpoint.read_into(tensor.name, found)
            assert found == expected_bytes(name, tensor.name), tensor.name


def test_every_folder_in_data_is_tested() -> None:
    found = {f"{path.parent.name.removeprefix('freetoken-')}/{path.name}" for path in DATA.glob("freetoken-[0-9]*/*")}
    assert found == set(FOLDERS)


@every_folder
def test_folder_holds_what_freetoken_was_given(name: str) -> None:
    assert_holds_what_was_written(folder_of(name), name)


@every_folder
def test_kinds_and_metadata_are_kept(name: str) -> None:
    with ftw.open_checkpoint(folder_of(name)) as checkpoint:
        kinds = [tensor.kind for tensor in checkpoint.tensors.values() if not tensor.shard]
        counts = {kind: kinds.count(kind) for kind in ("weight", "experts_bank")}
        assert checkpoint.metadata["counts"] == counts
        assert checkpoint.metadata["source_model_path"] == "/models/source"
        assert len(checkpoint.metadata["fingerprint"]) == 16


@every_folder
def test_verdict(name: str) -> None:
    report = ftw.inspect(folder_of(name))
    assert {table.name: table.reason for table in report.verdict.tables} == FOLDERS[name].tables
    assert report.format == "ftw"


@every_folder
def test_verification_finds_nothing_and_no_checksums(name: str) -> None:
    result = ftw.verify(folder_of(name))
    assert (result.problems, result.num_checksums) == ((), 0)
    assert result.num_tensors == len(FOLDERS[name].tensors)


@every_folder
def test_load_yields_what_is_stored_less_the_host_tables(name: str) -> None:
    tables = {table for table, reason in FOLDERS[name].tables.items() if reason == "ok"}
    with ftw.load(folder_of(name), embed="auto", device="cpu") as model:
        weights = dict(model.weights())
        assert set(model.tables) == tables
    on_host = {tensor for tensor in FOLDERS[name].tensors if tensor in tables or tensor.startswith(NGRAM)}
    assert set(weights) == set(FOLDERS[name].tensors) - on_host
    for tensor, values in weights.items():
        assert values.shape == FOLDERS[name].tensors[tensor][1]
        assert bytes_of(values) == expected_bytes(name, tensor)


PLAIN_TABLES = [name for name in FOLDERS if not name.endswith("gguf")]


@pytest.mark.parametrize("name", PLAIN_TABLES)
def test_rows_of_a_plain_table(name: str) -> None:
    ids = torch.tensor([63, 0, 5, 64, 5, -1])
    rows = torch.frombuffer(bytearray(expected_bytes(name, TABLE)), dtype=torch.int16).view(64, 8)
    with ftw.load(folder_of(name), embed="auto", device="cpu") as model:
        found = model.embedding(ids).view(torch.int16)
    assert torch.equal(found[[0, 1, 2, 4]], rows[[63, 0, 5, 5]])
    assert not found[[3, 5]].any()


def test_rows_of_the_side_files_table() -> None:
    name = "0.2.1/banks-layer"
    parts = b"".join(expected_bytes(name, f"{NGRAM}.shard_{number}.weight") for number in range(2))
    with ftw.load(folder_of(name), embed="auto", device="cpu") as model:
        found = model.tables[NGRAM](torch.arange(32))
    assert bytes_of(found) == parts


@pytest.mark.parametrize(
    ("name", "ggml_type"), [("0.1.2/gguf", "Q6_K"), ("0.2.1/gguf", "Q8_0")], ids=["0.1.2", "0.2.1"]
)
def test_rows_of_a_packed_table(name: str, ggml_type: str) -> None:
    """Neither type nor number of rows is recorded: 0.2.1's table has 7 rows of padding."""
    [(table, _)] = FOLDERS[name].tables.items()
    content = np.frombuffer(expected_bytes(name, table), np.uint8).reshape(FOLDERS[name].tensors[table][1])
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.dequantize(content[:ROWS], gguf.GGMLQuantizationType[ggml_type]))
    with ftw.load(folder_of(name), embed="auto", device="cpu", dtype=torch.float32) as model:
        assert model.embedding.num_embeddings == ROWS
        assert model.memory.placement == ("host" if FOLDERS[name].tables[table] == "ok" else "gpu")
        found = model.embedding(torch.arange(ROWS + 7))
    assert torch.equal(found[:ROWS].nan_to_num(), expected.nan_to_num())
    assert not found[ROWS:].any()


@pytest.mark.parametrize("shard_limit", [4096, 12288, 1 << 20])
@every_folder
def test_ftw_made_anew_holds_the_same(tmp_path: Path, name: str, shard_limit: int) -> None:
    ftw.convert(folder_of(name), tmp_path / "anew", embed="auto", shard_limit=shard_limit)
    assert_holds_what_was_written(tmp_path / "anew", name)
    result = ftw.verify(tmp_path / "anew", against=folder_of(name))
    assert (result.problems, result.num_compared) == ((), len(FOLDERS[name].tensors))
    assert result.num_checksums == len(FOLDERS[name].tensors)
    report = ftw.inspect(tmp_path / "anew")
    assert {table.name: table.reason for table in report.verdict.tables} == FOLDERS[name].tables


@every_folder
def test_ftw_made_anew_keeps_freetokens_keys(tmp_path: Path, name: str) -> None:
    """Its loader goes by them, and by the kinds of tensors; it finds its own names again."""
    ftw.convert(folder_of(name), tmp_path / "anew", embed="auto")
    old, new = (
        json.loads((folder / "freetoken_weight.json").read_text()) for folder in (folder_of(name), tmp_path / "anew")
    )
    for key in ("fingerprint", "quant_format", "layer_quant_formats", "expert_bank_num_layers", "copied_metadata"):
        assert new.get(key) == old.get(key)
    kinds = {entry["name"]: entry["kind"] for entry in new["tensors"]}
    assert kinds.items() >= {entry["name"]: entry["kind"] for entry in old["tensors"]}.items()


def test_ftw_made_anew_holds_side_files_in_its_region(tmp_path: Path) -> None:
    ftw.convert(folder_of("0.2.1/banks-layer"), tmp_path / "anew")
    assert not list((tmp_path / "anew").glob("*.safetensors"))
    with ftw.open_checkpoint(tmp_path / "anew") as checkpoint:
        assert "side_files" not in checkpoint.metadata
        assert not checkpoint.tensors[f"{NGRAM}.shard_0.weight"].shard
