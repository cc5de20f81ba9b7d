"""The safetensors reader: golden bytes, the format's own library, which files of a folder count, hostile bytes."""

import json
from pathlib import Path

import pytest
import safetensors
import torch
from builders import llama_config, llama_tensors, safetensors_bytes, tensor_entry, write_checkpoint, write_sharded
from hypothesis import given, settings
from hypothesis import strategies as st
from inspecting import assert_names_file, open_unless_refused, stored_bytes, tensor_bytes
from safetensors.torch import save_file

from ftw import CheckpointError, TensorInfo, open_checkpoint
from ftw.dtypes import BY_TORCH_NAME, torch_shape

HEADER = (
    b'{"__metadata__":{"format":"pt"},'
    b'"b":{"dtype":"BF16","shape":[2,1],"data_offsets":[4,8]},'
    b'"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},'
    b'"e":{"dtype":"U8","shape":[0,3],"data_offsets":[8,8],"more":null}}   '
)
GOLDEN = b"\xd1\x00\x00\x00\x00\x00\x00\x00" + HEADER + b"\x00\x00\x80\x3f" + b"\x40\x40\x80\xc0"

TORCH_DTYPES = [getattr(torch, name) for name in BY_TORCH_NAME if hasattr(torch, name)]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch") / "mutated.safetensors"


def test_golden_file_is_read_field_by_field(tmp_path: Path) -> None:
    file = tmp_path / "golden.safetensors"
    file.write_bytes(GOLDEN)
    with open_checkpoint(file) as checkpoint:
        assert (checkpoint.format, checkpoint.folder, dict(checkpoint.metadata)) == (
            "safetensors",
            tmp_path,
            {"format": "pt"},
        )
        assert list(checkpoint.tensors.values()) == [
            TensorInfo("a", "F32", (), 217, 4, "golden.safetensors"),
            TensorInfo("b", "BF16", (2, 1), 221, 4, "golden.safetensors"),
            TensorInfo("e", "U8", (0, 3), 225, 0, "golden.safetensors"),
        ]
        assert [stored_bytes(checkpoint, name) for name in "abe"] == [b"\x00\x00\x80\x3f", b"\x40\x40\x80\xc0", b""]
        assert checkpoint.left_out == ()


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_library_written_file_reads_equal(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (7, 5, 16), dtype=torch.uint8)
    values = raw.view(dtype)
    tensors = {
        "matrix": values[0],
        "cube": values,
        "scalar": values.reshape(-1)[0].clone(),
        "empty": torch.empty(0, 3, dtype=dtype),
    }
    known = BY_TORCH_NAME[str(dtype).removeprefix("torch.")]
    if known.torch_elements > 1:
        del tensors["scalar"]
    file = tmp_path / "model.safetensors"
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file)
    library = dict(safetensors.deserialize(file.read_bytes()))
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == set(tensors)
        for name, tensor in tensors.items():
            info = checkpoint.tensors[name]
            assert (torch_shape(known, info.shape), info.dtype) == (tuple(tensor.shape), known.name)
            assert stored_bytes(checkpoint, name) == tensor_bytes(tensor) == bytes(library[name]["data"])


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [("F4", [3, 2], 3), ("F6_E2M3", [4], 3), ("F6_E3M2", [2, 4], 6)],
    ids=["F4", "F6_E2M3", "F6_E3M2"],
)
def test_elements_below_a_byte_are_measured_in_bits(tmp_path: Path, dtype: str, shape: list[int], nbytes: int) -> None:
    file = tmp_path / "model.safetensors"
    content = safetensors_bytes({"t": tensor_entry(dtype, shape, 0, nbytes)}, bytes(range(nbytes)))
    file.write_bytes(content)
    assert bytes(safetensors.deserialize(content)[0][1]["data"]) == bytes(range(nbytes))
    with open_checkpoint(file) as checkpoint:
        assert stored_bytes(checkpoint, "t") == bytes(range(nbytes))


def test_read_into_takes_any_part_of_a_tensor(tmp_path: Path) -> None:
    with open_checkpoint(write_checkpoint(tmp_path, {"t": torch.arange(100, dtype=torch.uint8)})) as checkpoint:
        buffer = bytearray(7)
        checkpoint.read_into("t", buffer, offset=93)
        assert bytes(buffer) == bytes(range(93, 100))
        with pytest.raises(CheckpointError, match="bytes 94 to 101 were asked for, it has 100"):
            checkpoint.read_into("t", buffer, offset=94)


def test_header_with_zero_size_tensors_between_others_is_read(tmp_path: Path) -> None:
    header = {
        "b": tensor_entry("U8", [2], 2, 4),
        "z2": tensor_entry("F32", [0], 2, 2),
        "z1": tensor_entry("I64", [4, 0], 2, 2),
        "a": tensor_entry("U8", [2], 0, 2),
    }
    (tmp_path / "m.safetensors").write_bytes(safetensors_bytes(header, b"abcd"))
    with open_checkpoint(tmp_path) as checkpoint:
        assert [tensor.offset - checkpoint.tensors["a"].offset for tensor in checkpoint.tensors.values()] == [
            0,
            2,
            2,
            2,
        ]
        assert [stored_bytes(checkpoint, name) for name in ("a", "b", "z1", "z2")] == [b"ab", b"cd", b"", b""]


@pytest.mark.parametrize("content", [b"{}", b"  {}  ", b'{"__metadata__":{}}'], ids=["bare", "spaces", "metadata"])
def test_header_without_tensors_is_read(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "m.safetensors"
    file.write_bytes(safetensors_bytes(content))
    with open_checkpoint(file) as checkpoint:
        assert (dict(checkpoint.tensors), checkpoint.nbytes) == ({}, 0)


@pytest.mark.parametrize("opened", ["folder", "file"])
def test_one_file_is_a_checkpoint(tmp_path: Path, opened: str) -> None:
    tensors = llama_tensors()
    folder = write_checkpoint(tmp_path, tensors, llama_config())
    with open_checkpoint(folder if opened == "folder" else folder / "model.safetensors") as checkpoint:
        assert {name: stored_bytes(checkpoint, name) for name in checkpoint.tensors} == {
            name: tensor_bytes(tensor) for name, tensor in tensors.items()
        }
        assert checkpoint.config.vocab_size == 64


@pytest.mark.parametrize("opened", ["folder", "index"])
def test_shards_with_an_index_are_one_checkpoint(tmp_path: Path, opened: str) -> None:
    shards = {
        f"model-0000{number}-of-00003.safetensors": {f"t{number}": torch.full((3, number), number)}
        for number in (1, 2, 3)
    }
    write_sharded(tmp_path, shards)
    source = tmp_path if opened == "folder" else tmp_path / "model.safetensors.index.json"
    with open_checkpoint(source) as checkpoint:
        assert [file.path.name for file in checkpoint.files] == sorted(shards)
        for shard, tensors in shards.items():
            for name, tensor in tensors.items():
                assert checkpoint.tensors[name].shard == shard
                assert stored_bytes(checkpoint, name) == tensor_bytes(tensor)


def test_index_may_name_a_shard_in_a_subfolder(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "part", {"t": torch.arange(4)}, file="a.safetensors")
    (tmp_path / "x.safetensors.index.json").write_text(json.dumps({"weight_map": {"t": "part/a.safetensors"}}))
    with open_checkpoint(tmp_path) as checkpoint:
        assert stored_bytes(checkpoint, "t") == tensor_bytes(torch.arange(4))


def test_tensor_that_the_index_forgot_is_read(tmp_path: Path) -> None:
    write_sharded(tmp_path, {"a.safetensors": {"t": torch.arange(4)}})
    write_checkpoint(tmp_path, {"t": torch.arange(4), "u": torch.arange(2)}, file="a.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        assert stored_bytes(checkpoint, "u") == tensor_bytes(torch.arange(2))


def test_folder_of_several_files_without_an_index_is_one_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"a": torch.arange(3)}, file="x.safetensors")
    write_checkpoint(tmp_path, {"b": torch.arange(5)}, file="y.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint.tensors) == ["a", "b"]
        assert stored_bytes(checkpoint, "b") == tensor_bytes(torch.arange(5))


def test_same_name_in_two_files_without_an_index_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"a": torch.arange(3)}, file="x.safetensors")
    write_checkpoint(tmp_path, {"a": torch.arange(3)}, file="y.safetensors")
    with pytest.raises(CheckpointError, match=r"a: lies in x\.safetensors too, and no index says") as caught:
        open_checkpoint(tmp_path)
    assert_names_file(caught.value, tmp_path / "y.safetensors")


def test_numbered_shards_without_an_index_are_read_when_all_are_there(tmp_path: Path) -> None:
    for number in (1, 2):
        write_checkpoint(tmp_path, {f"t{number}": torch.arange(3)}, file=f"model-0000{number}-of-00002.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint.tensors) == ["t1", "t2"]


def test_numbered_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    for number in (1, 3):
        write_checkpoint(tmp_path, {f"t{number}": torch.arange(3)}, file=f"model-0000{number}-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: is missing") as caught:
        open_checkpoint(tmp_path)
    assert_names_file(caught.value, tmp_path)


def test_one_numbered_shard_alone_is_refused(tmp_path: Path) -> None:
    file = "model-00001-of-00003.safetensors"
    write_checkpoint(tmp_path, {"t": torch.arange(3)}, file=file)
    with pytest.raises(CheckpointError, match="is one shard of 3, open the folder instead"):
        open_checkpoint(tmp_path / file)


@pytest.mark.parametrize(
    ("stray", "reason"),
    [
        ("consolidated.safetensors", "another copy of the weights"),
        ("consolidated.00.safetensors", "another copy of the weights"),
        ("adapter_model.safetensors", "an adapter, not the model"),
    ],
    ids=["consolidated", "consolidated-part", "adapter"],
)
@pytest.mark.parametrize("layout", ["model", "index", "several"])
def test_stray_file_is_left_out_and_reported(tmp_path: Path, layout: str, stray: str, reason: str) -> None:
    if layout == "index":
        write_sharded(tmp_path, {"model-00001-of-00001.safetensors": {"t": torch.arange(3)}})
    else:
        write_checkpoint(
            tmp_path, {"t": torch.arange(3)}, file="model.safetensors" if layout == "model" else "x.safetensors"
        )
    write_checkpoint(tmp_path, {"t": torch.arange(9)}, file=stray)
    with open_checkpoint(tmp_path) as checkpoint:
        assert stored_bytes(checkpoint, "t") == tensor_bytes(torch.arange(3))
        assert checkpoint.left_out == (("file", stray, reason),)


def test_shard_that_the_index_does_not_name_is_left_out(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"t": torch.arange(9)}, file="model-00001-of-00007.safetensors")
    write_sharded(tmp_path, {"model-00001-of-00001.safetensors": {"t": torch.arange(3)}})
    with open_checkpoint(tmp_path) as checkpoint:
        assert stored_bytes(checkpoint, "t") == tensor_bytes(torch.arange(3))
        assert checkpoint.left_out == (("file", "model-00001-of-00007.safetensors", "the index does not name it"),)


def test_other_file_beside_model_safetensors_is_left_out(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"t": torch.arange(3)})
    write_checkpoint(tmp_path, {"t": torch.arange(9)}, file="extra.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        assert stored_bytes(checkpoint, "t") == tensor_bytes(torch.arange(3))
        assert checkpoint.left_out == (("file", "extra.safetensors", "model.safetensors is the checkpoint"),)


def test_stale_copy_in_another_shard_gives_way_to_the_index(tmp_path: Path) -> None:
    write_sharded(tmp_path, {"a.safetensors": {"t": torch.arange(3)}, "b.safetensors": {"u": torch.arange(2)}})
    write_checkpoint(tmp_path, {"u": torch.arange(2), "t": torch.arange(9)}, file="b.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        assert stored_bytes(checkpoint, "t") == tensor_bytes(torch.arange(3))
        assert checkpoint.left_out == (("tensor", "t", "a copy in b.safetensors, the index names a.safetensors"),)


def test_df11_folder_takes_the_module_files_beside_model_safetensors(tmp_path: Path) -> None:
    config = {"dfloat11_config": {"version": "0.5.0"}, "time_step_limit": [0.0, 1.0]}
    write_checkpoint(tmp_path, {"model.norm.weight": torch.ones(8)}, config)
    write_checkpoint(tmp_path, {"lm_head.luts": torch.zeros(2, 256, dtype=torch.uint8)}, file="lm_head.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == {"model.norm.weight", "lm_head.luts"}
        assert checkpoint.left_out == ()


def test_several_indexes_and_none_called_model_are_refused(tmp_path: Path) -> None:
    for stem in "ab":
        (tmp_path / f"{stem}.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"there are several, a\.safetensors\.index\.json, b\.") as caught:
        open_checkpoint(tmp_path)
    assert_names_file(caught.value, tmp_path)


def test_file_name_with_control_characters_stays_on_one_line(tmp_path: Path) -> None:
    for file in ("x\x1b[2J\n.safetensors", "y.safetensors"):
        write_checkpoint(tmp_path, {"a": torch.arange(3)}, file=file)
    with pytest.raises(CheckpointError, match=r"lies in x\\x1b\[2J\\n\.safetensors too") as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value).isprintable()


def test_file_cut_at_any_byte_is_refused(scratch: Path) -> None:
    for length in range(len(GOLDEN)):
        scratch.write_bytes(GOLDEN[:length])
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(scratch)
        assert_names_file(caught.value, scratch)


@st.composite
def mutated_files(draw: st.DrawFn) -> bytes:
    """Return the golden file with a few bytes replaced, inserted or removed, in most cases inside the header."""
    content = bytearray(GOLDEN)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(content) - 1))
        new = draw(
            st.one_of(st.binary(max_size=3), st.sampled_from([b"0", b"9", b"-", b'"', b"[", b"{", b",", b"1e9"]))
        )
        removed = draw(st.sampled_from([len(new), len(new), 0, 1]))
        content[place : place + removed] = new
    if draw(st.booleans()):  # a header length that fits again lets more of them through to the JSON
        content[:8] = max(len(content) - 16, 0).to_bytes(8, "little")
    return bytes(content)


@settings(max_examples=600)
@given(content=mutated_files())
def test_mutated_file_is_refused_or_wholly_readable(scratch: Path, content: bytes) -> None:
    scratch.write_bytes(content)
    checkpoint = open_unless_refused(scratch)
    if checkpoint is None:
        return
    found = {name: stored_bytes(checkpoint, name) for name in checkpoint.tensors}
    try:
        library = dict(safetensors.deserialize(content))
    except safetensors.SafetensorError:
        return
    assert found == {name: bytes(tensor["data"]) for name, tensor in library.items()}
    for name, tensor in library.items():
        info = checkpoint.tensors[name]
        assert (info.shape, info.dtype) == (tuple(tensor["shape"]), tensor["dtype"])
