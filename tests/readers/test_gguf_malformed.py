"""Every malformed GGUF file of `malformed_gguf` is refused; what is at the bounds is read."""

from pathlib import Path

import pytest
from gguf_builder import ARCHITECTURE, F32, Q8_0, entry, gguf_bytes, kv
from inspecting import assert_names_file
from malformed_gguf import DATA, FILES, GOOD, WIDE, keyed, nested_arrays

from ftw import CheckpointError
from ftw.readers import open_reader


@pytest.mark.parametrize(("content", "problem"), FILES.values(), ids=FILES)
def test_malformed_file_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    for source in (file, tmp_path):
        with pytest.raises(CheckpointError, match=problem) as caught:
            open_reader(source)
        assert_names_file(caught.value, file)


def test_file_that_the_malformed_ones_differ_from_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(GOOD)
    assert list(open_reader(file).tensors) == ["t"]


BOUNDS = {
    "key_of_65535_bytes": keyed(kv("k" * 65535, "u8", 1)),
    "arrays_of_127_levels": keyed(nested_arrays(127)),
    "alignment_of_1": gguf_bytes(
        [entry(offset=3)], bytes(35), kvs=[ARCHITECTURE, kv("general.alignment", "u32", 1)], alignment=1
    ),
    "alignment_of_a_mebibyte": gguf_bytes(
        [entry()], DATA, kvs=[ARCHITECTURE, kv("general.alignment", "u32", 1 << 20)], alignment=1 << 20
    ),
    "name_of_63_bytes": gguf_bytes([entry("t" * 63)], DATA),
    "no_dimensions": gguf_bytes([entry(sizes=())], DATA),
    "four_dimensions": gguf_bytes([entry(sizes=(2, 1, 2, 2))], DATA),
    "huge_dimensions_of_no_element": gguf_bytes([entry(sizes=(0, 1 << 31, 1 << 31))]),
    "embedding_as_wide_as_its_features": gguf_bytes(
        [entry("token_embd.weight", (8, 1))],
        DATA,
        kvs=[ARCHITECTURE, WIDE, kv("llama.features_length", "u32", 8)],
    ),
    "embedding_length_as_float": gguf_bytes(
        [entry("token_embd.weight", (8, 1))], DATA, kvs=[ARCHITECTURE, kv("llama.embedding_length", "f32", 16)]
    ),
    "embedding_of_one_dimension": gguf_bytes([entry("token_embd.weight", (8,))], DATA, kvs=[ARCHITECTURE, WIDE]),
    "split_count_of_0": gguf_bytes(kvs=[ARCHITECTURE, kv("split.count", "u16", 0)]),
    "split_count_of_1": gguf_bytes(kvs=[ARCHITECTURE, kv("split.count", "u16", 1)]),
}


@pytest.mark.parametrize("content", BOUNDS.values(), ids=BOUNDS)
def test_file_at_the_bounds_is_read(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    assert open_reader(file).metadata["general.architecture"] == "llama"


def test_array_with_a_bool_of_2_is_refused_when_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(keyed(kv("k", "array", ("bool", [0, 1, 2]))))
    with pytest.raises(CheckpointError, match="k: holds a bool of 2, 0 or 1 is needed") as caught:
        open_reader(file).metadata["k"].read()
    assert_names_file(caught.value, file)


def test_array_of_a_file_that_was_replaced_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(keyed(kv("k", "array", ("u8", [1]))))
    array = open_reader(file).metadata["k"]
    file.write_bytes(keyed(kv("other", "array", ("u8", [1]))))
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        array.read()


def test_type_that_is_not_f32_is_checked_by_its_own_size(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf_bytes([entry(sizes=(32, 2), code=Q8_0), entry("u", offset=96, code=F32)], bytes(128)))
    assert [tensor.nbytes for tensor in open_reader(file).tensors.values()] == [68, 32]
