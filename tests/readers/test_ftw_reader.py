"""The FTW reader: golden bytes, what other writers leave in the index, every check, hostile bytes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import (
    ftw_index,
    llama_config,
    llama_tensors,
    safetensors_bytes,
    tensor_entry,
    write_checkpoint,
    write_ftw,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from inspecting import assert_names_file, open_unless_refused, stored_bytes, tensor_bytes
from malformed_ftw import GOLDEN_INDEX, GOLDEN_REGION, INDEX, VARIANTS, WIDE, write_golden, write_variant

from ftw import CheckpointError, TensorInfo, open_checkpoint
from ftw.tensors import Extent


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_golden(tmp_path_factory.mktemp("scratch"))


@pytest.mark.parametrize("opened", ["folder", "index"])
def test_golden_folder_is_read_field_by_field(tmp_path: Path, opened: str) -> None:
    write_golden(tmp_path)
    with open_checkpoint(tmp_path if opened == "folder" else tmp_path / INDEX) as checkpoint:
        assert (checkpoint.format, checkpoint.folder, checkpoint.left_out) == ("ftw", tmp_path, ())
        assert [(file.path, file.nbytes) for file in checkpoint.files] == [
            (tmp_path / "freetoken-00000.ftw", 8192),
            (tmp_path / "freetoken-00001.ftw", 4096),
        ]
        assert list(checkpoint.tensors.values()) == [
            TensorInfo("one", "F32", (), 0, 4),
            TensorInfo("none", "BF16", (0, 7), 4096, 0, kind="experts_bank"),
            TensorInfo(
                "wide", "U8", (2, 2050), 4096, 4100,
                role="token_embedding", placement="host", ggml_type="Q4_0", logical_shape=(2, 3644),
                xxh3_64="0123456789abcdef",
            ),
        ]  # fmt: skip
        assert [stored_bytes(checkpoint, name) for name in checkpoint.tensors] == [b"\x00\x00\x80\x3f", b"", WIDE]
        assert checkpoint.extents("wide") == (Extent(0, 4096, 4096), Extent(1, 0, 4))
        assert checkpoint.extents("none") == ()


def test_unknown_index_keys_are_kept_as_metadata(tmp_path: Path) -> None:
    with open_checkpoint(write_golden(tmp_path)) as checkpoint:
        assert checkpoint.metadata == {
            "format": "freetoken_weight", "version": 1, "align": 4096, "shard_limit": 8192, "total_bytes": 12288,
            "quant_format": "bf16", "counts": {"weight": 3},
        }  # fmt: skip


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 1), (4095, 2), (4096, 4), (4099, 1), (10, 4085)], ids=str)
def test_part_of_a_tensor_across_shards_is_read(tmp_path: Path, offset: int, nbytes: int) -> None:
    with open_checkpoint(write_golden(tmp_path)) as checkpoint:
        buffer = bytearray(nbytes)
        checkpoint.read_into("wide", buffer, offset=offset)
        assert bytes(buffer) == WIDE[offset : offset + nbytes]


def test_tensor_that_spans_three_shards_is_read(tmp_path: Path) -> None:
    data = bytes(index % 251 for index in range(20_000))
    region = data + bytes(480)
    shards = []
    for number in range(5):
        name = f"freetoken-{number:05}.ftw"
        (tmp_path / name).write_bytes(region[number * 4096 : (number + 1) * 4096])
        shards.append({"file": name, "global_off": number * 4096, "nbytes": 4096})
    entry = {"name": "t", "kind": "weight", "dtype": "uint8", "shape": [20_000], "global_off": 0, "nbytes": 20_000}
    (tmp_path / INDEX).write_text(json.dumps(ftw_index([entry], shards, shard_limit=4096)))
    with open_checkpoint(tmp_path) as checkpoint:
        assert stored_bytes(checkpoint, "t") == data
        assert [extent.nbytes for extent in checkpoint.extents("t")] == [4096, 4096, 4096, 4096, 3616]


def test_folder_of_another_writer_without_checksums_is_read(tmp_path: Path) -> None:
    tensors = {
        **llama_tensors(),
        "scalar": torch.tensor(7),
        "none": torch.empty(0, 4),
        "f8": torch.ones(3).to(torch.float8_e8m0fnu),
    }
    write_ftw(tmp_path, tensors, quant_format="bf16", source_model_path="/home/x/model", fingerprint="abc")
    (tmp_path / "config.json").write_text(json.dumps(llama_config()))
    with open_checkpoint(tmp_path) as checkpoint:
        assert {name: stored_bytes(checkpoint, name) for name in checkpoint.tensors} == {
            name: tensor_bytes(tensor) for name, tensor in tensors.items()
        }
        assert {tensor.xxh3_64 for tensor in checkpoint.tensors.values()} == {None}
        assert checkpoint.config.vocab_size == 64


def test_region_without_tensors_is_read(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps(ftw_index([], [])))
    with open_checkpoint(tmp_path) as checkpoint:
        assert (dict(checkpoint.tensors), checkpoint.files) == ({}, ())


def test_side_files_are_read_and_the_region_wins(tmp_path: Path) -> None:
    write_ftw(tmp_path, {"both": torch.arange(3)}, side_files=["ple-table-00000.safetensors", "s.safetensors"])
    write_checkpoint(tmp_path, {"both": torch.arange(9), "ple": torch.arange(4)}, file="ple-table-00000.safetensors")
    write_checkpoint(tmp_path, {"engram": torch.arange(5)}, file="s.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tensors["ple"].shard == "ple-table-00000.safetensors"
        assert {name: stored_bytes(checkpoint, name) for name in checkpoint.tensors} == {
            name: tensor_bytes(torch.arange(length)) for name, length in {"both": 3, "ple": 4, "engram": 5}.items()
        }


def test_same_name_in_two_side_files_is_refused(tmp_path: Path) -> None:
    write_ftw(tmp_path, {"t": torch.arange(3)}, side_files=["a.safetensors", "b.safetensors"])
    for file in ("a.safetensors", "b.safetensors"):
        write_checkpoint(tmp_path, {"ple": torch.arange(9)}, file=file)
    with pytest.raises(CheckpointError, match=r"ple: lies in a\.safetensors too") as caught:
        open_checkpoint(tmp_path)
    assert_names_file(caught.value, tmp_path / "b.safetensors")


def test_malformed_side_file_is_refused(tmp_path: Path) -> None:
    write_ftw(tmp_path, {"t": torch.arange(3)}, side_files=["a.safetensors"])
    (tmp_path / "a.safetensors").write_bytes(safetensors_bytes({"t": tensor_entry("U8", [8], 0, 8)}, bytes(7)))
    with pytest.raises(CheckpointError, match="1 bytes short") as caught:
        open_checkpoint(tmp_path)
    assert_names_file(caught.value, tmp_path / "a.safetensors")


@pytest.mark.parametrize("version", [2, 10**50], ids=["2", "huge"])
def test_newer_version_is_refused_by_name(tmp_path: Path, version: int) -> None:
    write_ftw(tmp_path, {"t": torch.arange(3)}, version=version)
    with pytest.raises(CheckpointError, match=f"version: is {version}, this release reads version 1") as caught:
        open_checkpoint(tmp_path)
    assert_names_file(caught.value, tmp_path / INDEX)


@pytest.mark.parametrize(("place", "values", "problem"), VARIANTS.values(), ids=VARIANTS)
def test_malformed_index_is_refused(
    tmp_path: Path, place: tuple[Any, ...], values: dict[str, Any], problem: str
) -> None:
    write_checkpoint(tmp_path, {"side": torch.arange(3)}, file="s.safetensors")
    write_variant(tmp_path, place, values)
    with pytest.raises(CheckpointError, match=problem) as caught:
        open_checkpoint(tmp_path)
    assert_names_file(caught.value, tmp_path / INDEX)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("", "is not JSON"), ("[]", "holds a list"), ('{"a":1,"a":1}', "'a' occurs twice")],
    ids=["empty", "list", "duplicate_key"],
)
def test_index_that_is_no_object_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    write_golden(tmp_path)
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=problem) as caught:
        open_checkpoint(tmp_path)
    assert_names_file(caught.value, tmp_path / INDEX)


def test_missing_shard_is_refused(tmp_path: Path) -> None:
    file = write_golden(tmp_path) / "freetoken-00001.ftw"
    file.unlink()
    with pytest.raises(CheckpointError, match="file: is missing") as caught:
        open_checkpoint(tmp_path)
    assert_names_file(caught.value, file)


@pytest.mark.parametrize("length", [0, 1, 4095, 4097, 8192], ids=str)
def test_shard_of_another_length_is_refused(tmp_path: Path, length: int) -> None:
    file = write_golden(tmp_path) / "freetoken-00001.ftw"
    file.write_bytes(bytes(length))
    with pytest.raises(CheckpointError, match=f"file: is {length} bytes long, the index says 4096") as caught:
        open_checkpoint(tmp_path)
    assert_names_file(caught.value, file)


def test_shard_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    file = write_golden(tmp_path) / "freetoken-00001.ftw"
    file.unlink()
    file.mkdir()
    with pytest.raises(CheckpointError, match="file: is not a regular file") as caught:
        open_checkpoint(tmp_path)
    assert_names_file(caught.value, file)


def test_index_cut_at_any_byte_is_refused(scratch: Path) -> None:
    for length in range(len(GOLDEN_INDEX)):
        (scratch / INDEX).write_bytes(GOLDEN_INDEX[:length])
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(scratch)
        assert_names_file(caught.value, scratch / INDEX)


@st.composite
def mutated_indexes(draw: st.DrawFn) -> bytes:
    """Return the golden index with a few bytes replaced, inserted or removed, digits most of all."""
    content = bytearray(GOLDEN_INDEX)
    digits = [place for place, byte in enumerate(GOLDEN_INDEX) if chr(byte).isdigit()]
    for _ in range(draw(st.integers(1, 4))):
        place = min(draw(st.one_of(st.integers(0, len(content) - 1), st.sampled_from(digits))), len(content) - 1)
        new = draw(
            st.one_of(st.binary(max_size=2), st.sampled_from([b"0", b"4096", b"-", b'"', b"[", b"{", b",", b"."]))
        )
        removed = draw(st.sampled_from([len(new), len(new), 0, 1]))
        content[place : place + removed] = new
    return bytes(content)


@settings(max_examples=600)
@given(content=mutated_indexes())
def test_mutated_index_is_refused_or_wholly_readable(scratch: Path, content: bytes) -> None:
    (scratch / INDEX).write_bytes(content)
    checkpoint = open_unless_refused(scratch)
    if checkpoint is not None:
        for name, tensor in checkpoint.tensors.items():
            assert stored_bytes(checkpoint, name) == GOLDEN_REGION[tensor.offset : tensor.offset + tensor.nbytes]
