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

from ftw import CheckpointError, TensorInfo, open_checkpoint
from ftw.tensors import Extent

INDEX = "freetoken_weight.json"

# Two shards of two and one blocks: `wide` spans them, `none` shares its offset with `wide`, `one` is a scalar.
GOLDEN_INDEX = b"""{
"format": "freetoken_weight", "version": 1, "align": 4096, "shard_limit": 8192, "total_bytes": 12288,
"quant_format": "bf16", "counts": {"weight": 3},
"tensors": [
 {"name": "one", "kind": "weight", "dtype": "float32", "shape": [], "global_off": 0, "nbytes": 4, "later": [1]},
 {"name": "none", "kind": "experts_bank", "dtype": "bfloat16", "shape": [0, 7], "global_off": 4096, "nbytes": 0},
 {"name": "wide", "kind": "weight", "dtype": "uint8", "shape": [2, 2050], "global_off": 4096, "nbytes": 4100,
  "ggml_type": "Q4_0", "logical_shape": [2, 3644], "role": "token_embedding", "placement": "host",
  "xxh3_64": "0123456789abcdef"}
],
"shards": [
 {"file": "freetoken-00000.ftw", "global_off": 0, "nbytes": 8192},
 {"file": "freetoken-00001.ftw", "global_off": 8192, "nbytes": 4096}
]}"""
WIDE = bytes(range(256)) * 16 + b"tail"
GOLDEN_REGION = b"\x00\x00\x80\x3f" + bytes(4092) + WIDE + bytes(4092)


def write_golden(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / INDEX).write_bytes(GOLDEN_INDEX)
    (folder / "freetoken-00000.ftw").write_bytes(GOLDEN_REGION[:8192])
    (folder / "freetoken-00001.ftw").write_bytes(GOLDEN_REGION[8192:])
    return folder


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


HUGE = 10**4299 // 4096 * 4096

# (what to change: () for the index itself, ("tensors", n) or ("shards", n) for an entry), (new values), problem
VARIANTS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "format_other": ((), {"format": "gguf"}, "format: is 'gguf', 'freetoken_weight' is needed"),
    "format_missing": ((), {"format": ...}, "format: is None"),
    "format_long": ((), {"format": ["x"] * 9000}, r"format: is \['x', .*\.\.\., 'freetoken"),
    "version_missing": ((), {"version": ...}, "version: is None, 1 is needed"),
    "version_zero": ((), {"version": 0}, "version: is 0, 1 is needed"),
    "version_text": ((), {"version": "1"}, "version: is '1', 1 is needed"),
    "version_true": ((), {"version": True}, "version: is True, 1 is needed"),
    "align_other": ((), {"align": 512}, "align: is 512, 4096 is needed"),
    "align_missing": ((), {"align": ...}, "align: is None"),
    "shard_limit_missing": ((), {"shard_limit": ...}, "shard_limit: is None, a positive multiple of 4096"),
    "shard_limit_zero": ((), {"shard_limit": 0}, "shard_limit: is 0"),
    "shard_limit_odd": ((), {"shard_limit": 8193}, "shard_limit: is 8193"),
    "shard_limit_negative": ((), {"shard_limit": -4096}, "shard_limit: is -4096"),
    "total_bytes_missing": ((), {"total_bytes": ...}, "total_bytes: is None, a number of bytes"),
    "total_bytes_float": ((), {"total_bytes": 12288.0}, "total_bytes: is 12288.0"),
    "total_bytes_more": ((), {"total_bytes": 16384}, "total_bytes: is 16384, the shards hold 12288"),
    "total_bytes_huge": ((), {"total_bytes": HUGE}, "total_bytes: is .*, the shards hold 12288"),
    "tensors_missing": ((), {"tensors": ...}, "tensors: a list of objects is needed"),
    "tensors_object": ((), {"tensors": {}}, "tensors: a list of objects is needed"),
    "tensors_of_numbers": ((), {"tensors": [1]}, "tensors: a list of objects is needed"),
    "shards_missing": ((), {"shards": ...}, "shards: a list of objects is needed"),
    "shards_of_text": ((), {"shards": ["freetoken-00000.ftw"]}, "shards: a list of objects is needed"),
    "shards_empty": ((), {"shards": []}, "total_bytes: is 12288, the shards hold 0"),
    "side_files_number": ((), {"side_files": 1}, "side_files: a list of file names"),
    "side_files_object": ((), {"side_files": {"a": "b"}}, "side_files: a list of file names"),
    "side_files_of_numbers": ((), {"side_files": [1]}, "side_files: a list of file names"),
    "side_files_outside": ((), {"side_files": ["../a.safetensors"]}, "side_files: a list of file names"),
    "side_files_twice": ((), {"side_files": ["s.safetensors"] * 2}, "side_files: 's.safetensors' occurs twice"),
    "shard_file_missing": (("shards", 0), {"file": ...}, "shard 0: file is None, the name of a file"),
    "shard_file_number": (("shards", 0), {"file": 7}, "shard 0: file is 7"),
    "shard_file_empty": (("shards", 0), {"file": ""}, "shard 0: file is ''"),
    "shard_file_outside": (("shards", 1), {"file": "../freetoken-00001.ftw"}, "shard 1: file is '../"),
    "shard_file_absolute": (("shards", 1), {"file": "/etc/passwd"}, "shard 1: file is '/etc/passwd'"),
    "shard_file_parent": (("shards", 1), {"file": ".."}, r"shard 1: file is '\.\.'"),
    "shard_file_nul": (("shards", 1), {"file": "a\0"}, r"shard 1: file is 'a\\x00'"),
    "shard_file_twice": (("shards", 1), {"file": "freetoken-00000.ftw", "nbytes": 8192}, "00000.ftw' occurs twice"),
    "shard_offset_missing": (("shards", 0), {"global_off": ...}, "shard 0: global_off is None, a number of bytes"),
    "shard_offset_false": (("shards", 0), {"global_off": False}, "shard 0: global_off is False, a number of bytes"),
    "shard_offset_gap": (("shards", 1), {"global_off": 12288}, "shard 1: global_off is 12288, 8192 is needed"),
    "shard_offset_overlap": (("shards", 1), {"global_off": 4096}, "shard 1: global_off is 4096, 8192 is needed"),
    "shard_nbytes_missing": (("shards", 0), {"nbytes": ...}, "shard 0: nbytes is None"),
    "shard_nbytes_negative": (("shards", 0), {"nbytes": -1}, "shard 0: nbytes is -1"),
    "shard_nbytes_past_limit": (("shards", 0), {"nbytes": 12288}, "shard 0: nbytes is 12288, at most shard_limit"),
    "tensor_name_missing": (("tensors", 0), {"name": ...}, "tensor 0: name is None, a string is needed"),
    "tensor_name_number": (("tensors", 0), {"name": 1}, "tensor 0: name is 1"),
    "tensor_name_twice": (("tensors", 0), {"name": "wide"}, "wide: occurs twice, names must be unique"),
    "tensor_name_lines": (("tensors", 0), {"name": "a\nb", "kind": 1}, r"a\\nb: kind is 1"),
    "tensor_kind_missing": (("tensors", 0), {"kind": ...}, "one: kind is None, allowed are weight, experts_bank"),
    "tensor_kind_list": (("tensors", 0), {"kind": ["weight"]}, "one: kind is "),
    "tensor_dtype_missing": (("tensors", 0), {"dtype": ...}, "one: dtype is None, allowed are bool"),
    "tensor_dtype_on_disk_name": (("tensors", 0), {"dtype": "F32"}, "one: dtype is 'F32'"),
    "tensor_dtype_list": (("tensors", 0), {"dtype": ["float32"]}, "one: dtype is "),
    "tensor_shape_missing": (("tensors", 0), {"shape": ...}, "one: shape is .*, a list of non-negative"),
    "tensor_shape_negative": (("tensors", 2), {"shape": [-2, -2050]}, "wide: shape is .*, a list of non-negative"),
    "tensor_shape_bool": (("tensors", 2), {"shape": [True, 4100]}, "wide: shape is .*, a list of non-negative"),
    "tensor_shape_overflow": (("tensors", 2), {"shape": [1 << 62, 4]}, "wide: shape .* has 2.63 elements or more"),
    "tensor_shape_huge": (("tensors", 2), {"shape": [10**4000] * 2}, "wide: shape .* has 2.63 elements or more"),
    "tensor_nbytes_missing": (("tensors", 0), {"nbytes": ...}, r"one: nbytes is None, float32 \[\] takes 4"),
    "tensor_nbytes_less": (("tensors", 2), {"nbytes": 4099}, r"wide: nbytes is 4099, uint8 \[2, 2050\] takes 4100"),
    "tensor_nbytes_false": (("tensors", 1), {"nbytes": False}, "none: nbytes is False"),
    "tensor_offset_missing": (("tensors", 0), {"global_off": ...}, "one: global_off is None, a multiple of 4096"),
    "tensor_offset_odd": (("tensors", 0), {"global_off": 8}, "one: global_off is 8, a multiple of 4096"),
    "tensor_offset_negative": (("tensors", 0), {"global_off": -4096}, "one: global_off is -4096"),
    "tensor_offset_overlap": (("tensors", 0), {"global_off": 8192}, "one: begins at 8192 and overlaps"),
    "tensor_offset_alias": (("tensors", 0), {"global_off": 4096}, "wide: begins at 4096 and overlaps"),
    "tensor_end_past_region": (("tensors", 2), {"global_off": 8192}, "wide: ends at 16384 with its padding"),
    "tensor_offset_past_region": (("tensors", 0), {"global_off": 1 << 60}, "one: begins at 1152921504606846976, the"),
    "tensor_offset_huge": (("tensors", 0), {"global_off": HUGE}, "one: begins at .*, the shards hold 12288"),
    "empty_tensor_past_region": (("tensors", 1), {"global_off": 16384}, "none: begins at 16384, the shards hold 12288"),
    "logical_shape_text": (("tensors", 2), {"logical_shape": "x"}, "wide: logical_shape is .*, a list of non-"),
    "logical_shape_negative": (("tensors", 2), {"logical_shape": [-1]}, "wide: logical_shape is .*, a list of non-"),
    "role_number": (("tensors", 2), {"role": 1}, "wide: role is 1, a string is needed"),
    "placement_list": (("tensors", 2), {"placement": []}, r"wide: placement is \[\], a string is needed"),
    "ggml_type_number": (("tensors", 2), {"ggml_type": 2}, "wide: ggml_type is 2, a string is needed"),
    "xxh3_64_number": (("tensors", 2), {"xxh3_64": 5}, "wide: xxh3_64 is 5, a string is needed"),
}  # fmt: skip


@pytest.mark.parametrize(("place", "values", "problem"), VARIANTS.values(), ids=VARIANTS)
def test_malformed_index_is_refused(
    tmp_path: Path, place: tuple[Any, ...], values: dict[str, Any], problem: str
) -> None:
    write_golden(tmp_path)
    write_checkpoint(tmp_path, {"side": torch.arange(3)}, file="s.safetensors")
    index = json.loads(GOLDEN_INDEX)
    entry = index[place[0]][place[1]] if place else index
    entry.update(values)
    for key in [key for key, value in entry.items() if value is ...]:
        del entry[key]
    (tmp_path / INDEX).write_text(json.dumps(index))
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


@settings(max_examples=600, deadline=None)
@given(content=mutated_indexes())
def test_mutated_index_is_refused_or_wholly_readable(scratch: Path, content: bytes) -> None:
    (scratch / INDEX).write_bytes(content)
    checkpoint = open_unless_refused(scratch)
    if checkpoint is not None:
        for name, tensor in checkpoint.tensors.items():
            assert stored_bytes(checkpoint, name) == GOLDEN_REGION[tensor.offset : tensor.offset + tensor.nbytes]
