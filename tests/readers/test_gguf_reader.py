"""The GGUF reader: golden bytes, the gguf package as writer and reader, byte orders, folders, hostile bytes."""

import os
import shutil
import struct
import tracemalloc
from argparse import Namespace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFEndian, GGUFValueType
from gguf.scripts import gguf_convert_endian
from gguf_builder import (
    ARCHITECTURE,
    BF16,
    F16,
    F32,
    Q4_0,
    Q8_0,
    Blocks,
    entry,
    gguf_bytes,
    kv,
    little_endian,
    random_blocks,
    stored,
    text,
    value,
    write_gguf,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from inspecting import assert_names_file

from ftw import CheckpointError, SourceNotFoundError
from ftw.files import WeightFile
from ftw.ggml_types import PACKED_TYPES, ggml_types, ggml_types_by_name
from ftw.hub import Place
from ftw.readers import open_reader
from ftw.readers.gguf.metadata import MetadataArray, MetadataText
from ftw.readers.gguf.reader import GgufReader, read_gguf_metadata
from ftw.tensors import Extent, TensorInfo

GOLDEN = (
    b"GGUF" b"\x03\0\0\0" b"\x02\0\0\0\0\0\0\0" b"\x02\0\0\0\0\0\0\0"
    b"\x14\0\0\0\0\0\0\0general.architecture" b"\x08\0\0\0" b"\x05\0\0\0\0\0\0\0llama"
    b"\x01\0\0\0\0\0\0\0k" b"\x09\0\0\0" b"\x08\0\0\0" b"\x02\0\0\0\0\0\0\0" b"\x01\0\0\0\0\0\0\0a" b"\0\0\0\0\0\0\0\0"
    b"\x01\0\0\0\0\0\0\0q" b"\x02\0\0\0" b"\x20\0\0\0\0\0\0\0" b"\x02\0\0\0\0\0\0\0" b"\x08\0\0\0" b"\x20\0\0\0\0\0\0\0"
    b"\x01\0\0\0\0\0\0\0f" b"\x01\0\0\0" b"\x03\0\0\0\0\0\0\0" b"\0\0\0\0" b"\0\0\0\0\0\0\0\0"
    b"\0\0\0\0\0\0\0"
) + b"\0\0\x80\x3f\0\0\0\x40\0\0\x40\x40" + bytes(20) + bytes(range(68))  # fmt: skip
GOLDEN_BIG = (
    b"GGUF" b"\0\0\0\x03" b"\0\0\0\0\0\0\0\x01" b"\0\0\0\0\0\0\0\x01"
    b"\0\0\0\0\0\0\0\x14general.architecture" b"\0\0\0\x08" b"\0\0\0\0\0\0\0\x05llama"
    b"\0\0\0\0\0\0\0\x01f" b"\0\0\0\x01" b"\0\0\0\0\0\0\0\x03" b"\0\0\0\0" b"\0\0\0\0\0\0\0\0"
    + bytes(26)
) + b"\x3f\x80\0\0\x40\0\0\0\x40\x40\0\0"  # fmt: skip

LITTLE, BIG = GGUFEndian.LITTLE, GGUFEndian.BIG
TYPES = {known.name: GGMLQuantizationType(known.code) for known in ggml_types().values()}
NUMPY = {"F64": "f8", "F32": "f4", "F16": "f2", "I8": "i1", "I16": "i2", "I32": "i4", "I64": "i8"}
SWAPPABLE = [*PACKED_TYPES, *NUMPY, "BF16"]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch") / "mutated.gguf"


def write(folder: Path, content: bytes, name: str = "model.gguf") -> GgufReader:
    """Write a file and open it."""
    (folder / name).write_bytes(content)
    return open_reader(folder / name)


def scaled_blocks(name: str, rows: int = 64) -> Blocks:
    """Return rows of random blocks whose scales are those of real weights."""
    blocks = random_blocks(TYPES[name], rows, 4)
    data = blocks.data.reshape(-1, ggml_types_by_name()[name].type_size).copy()
    generator = np.random.default_rng(1)
    for field in PACKED_TYPES[name]:
        if field.width == 2 and field.number <= 2:
            scales = (generator.standard_normal((len(data), field.number)) * 0.01).astype("<f2")
            data[:, field.offset : field.offset + 2 * field.number] = scales.view(np.uint8)
    return Blocks(data.reshape(blocks.data.shape), blocks.ggml_type)


def bfloat16(rows: int = 64) -> Blocks:
    """Return rows of normally distributed weights."""
    weights = (np.random.default_rng(2).standard_normal((rows, 64)) * 0.02).astype("<f4")
    halves = np.ascontiguousarray(weights.view(np.uint8).reshape(rows, 64, 4)[..., 2:])
    return Blocks(halves.reshape(rows, 128), GGMLQuantizationType.BF16)


def test_golden_file_is_read_field_by_field(tmp_path: Path) -> None:
    reader = write(tmp_path, GOLDEN, "golden.gguf")
    assert (reader.format, reader.place.folder, reader.left_out, reader.byte_order) == ("gguf", tmp_path, (), "<")
    assert list(reader.tensors.values()) == [
        TensorInfo("f", "F32", (3,), 192, 12, "golden.gguf"),
        TensorInfo("q", "U8", (2, 34), 224, 68, "golden.gguf", ggml_type="Q8_0", logical_shape=(2, 32)),
    ]
    assert list(reader.tensors) == ["f", "q"]
    assert [stored(reader, name) for name in "fq"] == [struct.pack("<3f", 1, 2, 3), bytes(range(68))]
    assert reader.extents(reader.tensors["q"]) == (Extent(0, 224, 68),)
    assert reader.block_order(reader.tensors["q"]) is None
    assert list(reader.metadata) == ["general.architecture", "k"]
    assert reader.metadata["general.architecture"] == "llama"
    assert reader.metadata["k"] == MetadataArray(reader.files[0], "<", "k", "STRING", 2, 94)
    assert reader.metadata["k"].read() == ["a", ""]
    assert (reader.header_file, reader.metadata_end) == (reader.files[0], 111)


def test_golden_big_endian_file_is_read_field_by_field(tmp_path: Path) -> None:
    reader = write(tmp_path, GOLDEN_BIG, "golden.gguf")
    assert (reader.byte_order, reader.metadata) == (">", {"general.architecture": "llama"})
    assert list(reader.tensors.values()) == [TensorInfo("f", "F32", (3,), 128, 12, "golden.gguf")]
    assert reader.block_order(reader.tensors["f"]) == (3, 2, 1, 0)
    assert little_endian(reader, "f") == struct.pack("<3f", 1, 2, 3)


def test_golden_files_are_what_the_builder_makes() -> None:
    array = kv("k", "array", ("str", ["a", ""]))
    entries = [entry("q", (32, 2), Q8_0, 32), entry("f", (3,))]
    floats = struct.pack("<3f", 1, 2, 3)
    assert gguf_bytes(entries, floats + bytes(20) + bytes(range(68)), kvs=[ARCHITECTURE, array]) == GOLDEN
    architecture = kv("general.architecture", "str", "llama", order=">")
    floats = struct.pack(">3f", 1, 2, 3)
    assert gguf_bytes([entry("f", (3,), order=">")], floats, kvs=[architecture], order=">") == GOLDEN_BIG


@pytest.mark.parametrize("order", ["<", ">"], ids=["little", "big"])
def test_version_2_is_read_as_version_3(tmp_path: Path, order: str) -> None:
    architecture = kv("general.architecture", "str", "llama", order=order)
    reader = write(tmp_path, gguf_bytes([entry(order=order)], bytes(32), kvs=[architecture], version=2, order=order))
    assert (reader.byte_order, reader.tensors["t"].shape) == (order, (8,))


def assert_equals_library(reader: GgufReader, library: gguf.GGUFReader) -> None:
    assert {
        tensor.name: (tensor.data_offset, tensor.n_bytes, tensor.tensor_type.name) for tensor in library.tensors
    } == {
        tensor.name: (tensor.offset, tensor.nbytes, tensor.ggml_type or tensor.dtype)
        for tensor in reader.tensors.values()
    }
    for tensor in library.tensors:
        info = reader.tensors[tensor.name]
        assert (info.logical_shape or info.shape) == tuple(reversed(tensor.shape.tolist()))
        assert stored(reader, tensor.name) == tensor.data.tobytes()
        if info.ggml_type:
            assert info.shape == tensor.data.shape


@pytest.mark.parametrize("alignment", [None, 64, 4096], ids=["default", "64", "4096"])
@pytest.mark.parametrize("order", [LITTLE, BIG], ids=["little", "big"])
@pytest.mark.parametrize("name", TYPES)
def test_library_written_type_reads_equal(tmp_path: Path, name: str, order: GGUFEndian, alignment: int | None) -> None:
    if name in NUMPY:
        tensor: Any = (np.arange(35).reshape(5, 7) - 9).astype(NUMPY[name])
        bare = tensor.tobytes()
    else:
        tensor = random_blocks(TYPES[name])
        bare = tensor.data.tobytes()
    tensors = {"first": np.arange(3, dtype=np.float32), "matrix": tensor, "last": np.arange(5, dtype=np.float16)}
    path = write_gguf(tmp_path / "m.gguf", tensors, alignment=alignment, order=order)
    if order is BIG and name not in SWAPPABLE:
        with pytest.raises(
            CheckpointError, match=f"matrix: is {name} in big-endian order, which ftw cannot rear"
        ) as caught:
            open_reader(path)
        assert_names_file(caught.value, path)
        return
    reader = open_reader(path)
    assert_equals_library(reader, gguf.GGUFReader(path))
    assert list(reader.tensors) == ["first", "matrix", "last"]
    assert little_endian(reader, "first") == tensors["first"].tobytes()
    assert little_endian(reader, "last") == tensors["last"].tobytes()
    if name in NUMPY or order is LITTLE:
        assert little_endian(reader, "matrix") == bare


def test_library_written_shapes_read_slowest_first(tmp_path: Path) -> None:
    tensors = {
        "vector": np.arange(5, dtype=np.float32),
        "cube": np.arange(24, dtype=np.int16).reshape(2, 3, 4),
        "four": np.arange(120, dtype=np.int8).reshape(2, 3, 4, 5),
        "experts": Blocks(np.arange(2 * 3 * 34, dtype=np.uint8).reshape(2, 3, 34), GGMLQuantizationType.Q8_0),
    }
    reader = open_reader(write_gguf(tmp_path / "m.gguf", tensors))
    assert [tensor.shape for tensor in reader.tensors.values()] == [(5,), (2, 3, 4), (2, 3, 4, 5), (2, 3, 34)]
    assert reader.tensors["experts"].logical_shape == (2, 3, 32)


@pytest.mark.parametrize("order", [LITTLE, BIG], ids=["little", "big"])
def test_library_written_metadata_reads_equal(tmp_path: Path, order: GGUFEndian) -> None:
    kinds = GGUFValueType
    scalars = {
        "u8": (kinds.UINT8, 255), "i8": (kinds.INT8, -128), "u16": (kinds.UINT16, 65535), "i16": (kinds.INT16, -32768),
        "u32": (kinds.UINT32, 2**32 - 1), "i32": (kinds.INT32, -(2**31)), "u64": (kinds.UINT64, 2**64 - 1),
        "i64": (kinds.INT64, -(2**63)), "f32": (kinds.FLOAT32, 0.5), "f64": (kinds.FLOAT64, 0.1),
        "true": (kinds.BOOL, True), "false": (kinds.BOOL, False), "text": (kinds.STRING, "grüß\0 dich 🙂"),
    }  # fmt: skip
    arrays = {
        "ints": [1, -2, 3], "floats": [0.5, 1.5], "bools": [True, False], "strings": ["a", "", "ß" * 300],
        "one": [7], "nested": [[1, 2], [3]], "deep": [[["a"], ["b", "c"]], [["d"]]],
    }  # fmt: skip
    kvs = {**scalars, **{key: (kinds.ARRAY, content) for key, content in arrays.items()}}
    reader = open_reader(write_gguf(tmp_path / "m.gguf", {"t": np.zeros(3, np.float32)}, kvs, order=order))
    for key, (_, content) in scalars.items():
        assert (reader.metadata[key], type(reader.metadata[key])) == (content, type(content))
    for key, content in arrays.items():
        assert (len(reader.metadata[key]), reader.metadata[key].read()) == (len(content), content)
    types = {key: reader.metadata[key].element_type for key in arrays}
    assert types == {
        "ints": "INT32", "floats": "FLOAT32", "bools": "BOOL", "strings": "STRING", "one": "INT32", "nested": "ARRAY",
        "deep": "ARRAY",
    }  # fmt: skip
    start = (tmp_path / "m.gguf").read_bytes()[: reader.metadata_end]
    assert start.endswith(value("str", "d", order=reader.byte_order))


def test_nested_arrays_of_many_kinds_are_skipped_and_read(tmp_path: Path) -> None:
    inner = [
        value("array", ("u8", [1, 2])),
        value("array", ("array", [("str", ["x"]), ("f64", [])])),
        value("array", ("bool", [1])),
        value("array", ("array", [])),
    ]
    array = text("k") + struct.pack("<IIQ", 9, 9, len(inner)) + b"".join(inner)
    reader = write(tmp_path, gguf_bytes(kvs=[array, kv("after", "u8", 9), ARCHITECTURE]))
    assert reader.metadata["k"].read() == [[1, 2], [["x"], []], [True], []]
    assert reader.metadata["after"] == 9


def test_numpy_scalar_of_the_packages_writer_is_a_tensor_of_no_dimensions(tmp_path: Path) -> None:
    scalars = {"f32": np.float32(1.5), "f16": np.float16(-2), "i32": np.int32(7)}
    path = write_gguf(tmp_path / "m.gguf", {**scalars, "last": np.arange(3, dtype=np.float32)})
    reader = open_reader(path)
    for name, scalar in scalars.items():
        assert reader.tensors[name].shape == ()
        assert stored(reader, name) == scalar.tobytes()
    assert stored(reader, "last") == np.arange(3, dtype=np.float32).tobytes()


@pytest.mark.parametrize("nbytes", [1 << 20, (1 << 20) + 1, 9 << 20], ids=str)
def test_long_text_stays_in_the_file_and_is_read_when_asked(tmp_path: Path, nbytes: int) -> None:
    text = ("é" + "x" * 97) * (nbytes // 99) + "x" * (nbytes % 99)
    kvs = {"tokenizer.huggingface.json": (GGUFValueType.STRING, text), "after": (GGUFValueType.UINT8, 3)}
    reader = open_reader(write_gguf(tmp_path / "m.gguf", {"t": np.zeros(3, np.float32)}, kvs))
    found = reader.metadata["tokenizer.huggingface.json"]
    assert isinstance(found, MetadataText) is (nbytes > 1 << 20)
    assert (found.read() if isinstance(found, MetadataText) else found) == text
    assert reader.metadata["after"] == 3
    assert list(reader.tensors) == ["t"]


def test_text_that_is_not_utf8_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(kvs=[ARCHITECTURE, kv("general.name", "str", b"caf\xe9\xed\xa0")]))
    assert open_reader(tmp_path / "m.gguf").metadata["general.name"] == r"caf\xe9\xed\xa0"


def test_token_that_is_not_utf8_is_escaped(tmp_path: Path) -> None:
    reader = write(tmp_path, gguf_bytes(kvs=[ARCHITECTURE, kv("k", "array", ("str", [b"a\xff", "ß".encode()]))]))
    assert reader.metadata["k"].read() == ["a\\xff", "ß"]


def test_strings_across_windows_are_skipped_and_read(tmp_path: Path) -> None:
    strings = ["x" * length for length in (1, (1 << 20) - 13, 0, 3 << 20, 5, (1 << 20) - 8, 7, 1 << 20, 2)]
    whole = kv("whole", "str", "ß" * (1 << 20))
    reader = write(tmp_path, gguf_bytes(kvs=[kv("k", "array", ("str", strings)), whole, ARCHITECTURE]))
    assert reader.metadata["k"].read() == strings
    assert reader.metadata["whole"].read() == "ß" * (1 << 20)


def test_arrays_are_not_kept_in_memory(tmp_path: Path) -> None:
    tokens = b"".join(text(f"token {number}") for number in range(250_000))
    kvs = [
        ARCHITECTURE,
        text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 250_000) + tokens,
        text("tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, 250_000) + bytes(1_000_000),
        text("tokenizer.ggml.merges") + struct.pack("<IIQ", 9, 8, 250_000) + tokens,
    ]
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes([entry()], bytes(32), kvs=kvs))
    assert path.stat().st_size > 10 << 20
    tracemalloc.start()
    reader = open_reader(path)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20
    assert kept < 1 << 20
    assert {len(array) for key, array in reader.metadata.items() if key != "general.architecture"} == {250_000}
    assert reader.metadata["tokenizer.ggml.merges"].read()[249_999] == "token 249999"


def test_tensors_out_of_order_with_holes_are_read_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    data = bytes(32) + b"b" * 32 + bytes(64) + b"a" * 32
    reader = write(tmp_path, gguf_bytes([entry("a", offset=128), entry("b", offset=32)], data))
    assert list(reader.tensors) == ["b", "a"]
    assert [stored(reader, name) for name in "ab"] == [b"a" * 32, b"b" * 32]


@pytest.mark.parametrize("trailing", [0, 20, 999], ids=["none", "padding", "more"])
def test_bytes_after_the_last_tensor_may_be_missing_or_too_many(tmp_path: Path, trailing: int) -> None:
    reader = write(tmp_path, gguf_bytes([entry(sizes=(3,))], b"x" * 12 + bytes(trailing)))
    assert stored(reader, "t") == b"x" * 12


def test_tensors_without_elements_may_share_a_place(tmp_path: Path) -> None:
    entries = [
        entry("z", (0,), offset=32),
        entry("a", (3,)),
        entry("b", (3,), offset=32),
        entry("y", (32, 0), Q8_0, 32),
    ]
    reader = write(tmp_path, gguf_bytes(entries, bytes(44)))
    assert [(tensor.name, tensor.shape, tensor.nbytes) for tensor in reader.tensors.values()] == [
        ("a", (3,), 12),
        ("z", (0,), 0),
        ("y", (0, 34), 0),
        ("b", (3,), 12),
    ]
    assert reader.tensors["y"].logical_shape == (0, 32)


def test_tensor_without_elements_may_begin_where_the_padding_would_end(tmp_path: Path) -> None:
    reader = write(tmp_path, gguf_bytes([entry("a", (3,)), entry("z", (0,), offset=32)], bytes(12)))
    assert list(reader.tensors) == ["a", "z"]


def test_file_of_a_vocabulary_alone_is_read(tmp_path: Path) -> None:
    content = gguf_bytes(kvs=[ARCHITECTURE, kv("tokenizer.ggml.tokens", "array", ("str", ["a"]))])
    assert len(content) % 32
    reader = write(tmp_path, content)
    assert (dict(reader.tensors), reader.metadata_end) == ({}, len(content))


def test_metadata_of_a_file_whose_data_are_missing_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(GOLDEN[:192])
    metadata = read_gguf_metadata(WeightFile(path))
    assert (metadata["general.architecture"], metadata["k"].read()) == ("llama", ["a", ""])


# --- byte orders


def turned(blocks: Blocks, name: str) -> Blocks:
    """Return blocks with each of their fields in the other byte order."""
    data = blocks.data.reshape(-1, ggml_types_by_name()[name].type_size).copy()
    for field in PACKED_TYPES[name]:
        for start in range(field.offset, field.offset + field.number * field.width, field.width):
            data[:, start : start + field.width] = data[:, start : start + field.width][:, ::-1]
    return Blocks(data.reshape(blocks.data.shape), blocks.ggml_type)


@pytest.mark.parametrize("name", PACKED_TYPES)
def test_big_endian_blocks_are_rearranged_field_by_field(tmp_path: Path, name: str) -> None:
    blocks = scaled_blocks(name)
    tensors = {"t": turned(blocks, name), "other": turned(scaled_blocks("Q8_0"), "Q8_0")}
    reader = open_reader(write_gguf(tmp_path / "m.gguf", tensors, order=BIG))
    assert little_endian(reader, "t") == blocks.data.tobytes()
    assert (reader.block_order(reader.tensors["t"]) is None) == (not PACKED_TYPES[name])


def test_big_endian_file_by_the_packages_own_script_is_rearranged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {
        **{name: scaled_blocks(name) for name in ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4", "NVFP4")},
        "F32": np.arange(6, dtype=np.float32),
        "F16": np.arange(6, dtype=np.float16),
        "BF16": bfloat16(),
    }
    little = open_reader(write_gguf(tmp_path / "little.gguf", tensors, {"k": (GGUFValueType.ARRAY, ["a", "bc"])}))
    path = Path(shutil.copy(tmp_path / "little.gguf", tmp_path / "big.gguf"))
    monkeypatch.setattr("builtins.input", lambda prompt: "YES")
    monkeypatch.setattr(gguf_convert_endian, "tqdm", lambda iterable, **_: _Silent(iterable))
    gguf_convert_endian.convert_byteorder(gguf.GGUFReader(path, "r+"), Namespace(order="big", dry_run=False))
    big = open_reader(path)
    assert (big.byte_order, big.metadata["k"].read()) == (">", ["a", "bc"])
    for name in tensors:
        assert little_endian(big, name) == stored(little, name)
        assert (stored(big, name) == stored(little, name)) == (name in ("MXFP4", "NVFP4"))


class _Silent(list[Any]):
    def set_description(self, text: str) -> None:
        pass


@pytest.mark.parametrize("name", [name for name in PACKED_TYPES if name not in ("IQ1_M", "MXFP4", "NVFP4")])
def test_blocks_that_the_packages_writer_left_little_endian_are_taken_as_they_are(tmp_path: Path, name: str) -> None:
    tensors = {"packed": scaled_blocks(name), "norm": np.arange(6, dtype=np.float32), "half": bfloat16()}
    reader = open_reader(write_gguf(tmp_path / "m.gguf", tensors, order=BIG))
    assert [reader.block_order(reader.tensors[name]) for name in tensors] == [None, (3, 2, 1, 0), None]
    assert little_endian(reader, "packed") == tensors["packed"].data.tobytes()
    assert little_endian(reader, "norm") == tensors["norm"].tobytes()


def test_little_endian_blocks_speak_for_types_without_a_scale(tmp_path: Path) -> None:
    tensors = {"scaled": scaled_blocks("Q8_0"), "bare": random_blocks(TYPES["IQ1_M"])}
    reader = open_reader(write_gguf(tmp_path / "m.gguf", tensors, order=BIG))
    assert reader.block_order(reader.tensors["bare"]) is None


def test_bf16_is_judged_apart_from_packed_blocks(tmp_path: Path) -> None:
    half = bfloat16()
    other = Blocks(np.ascontiguousarray(half.data.reshape(-1, 2)[:, ::-1]).reshape(half.data.shape), half.ggml_type)
    reader = open_reader(write_gguf(tmp_path / "m.gguf", {"q": scaled_blocks("Q4_0"), "half": other}, order=BIG))
    assert [reader.block_order(reader.tensors[name]) for name in ("q", "half")] == [None, (1, 0)]
    assert little_endian(reader, "half") == half.data.tobytes()


def dequantized_mxfp4() -> np.ndarray:
    """Return weights whose BF16 has next to no mantissa, as those of a dequantised MXFP4 model."""
    generator = np.random.default_rng(3)
    values = generator.choice([0.0, 0.5, 1, 1.5, 2, 3, 4, 6], (64, 64)) * generator.choice([-1, 1], (64, 64))
    return values * 2.0 ** generator.integers(-20, 0, (64, 1))


def half_zeros() -> np.ndarray:
    generator = np.random.default_rng(4)
    return generator.standard_normal((64, 64)) * 0.02 * generator.integers(0, 2, (64, 64))


@pytest.mark.parametrize("weights", [dequantized_mxfp4(), half_zeros()], ids=["little-mantissa", "half-zeros"])
@pytest.mark.parametrize("is_turned", [False, True], ids=["left-little", "turned"])
def test_bf16_of_unusual_weights_is_told_apart(tmp_path: Path, weights: np.ndarray, is_turned: bool) -> None:
    halves = np.ascontiguousarray(weights.astype("<f4").view("<u2").reshape(64, 64, 2)[..., 1])
    data = (halves.byteswap() if is_turned else halves).view(np.uint8)
    path = write_gguf(tmp_path / "m.gguf", {"t": Blocks(data, GGMLQuantizationType.BF16)}, order=BIG)
    assert little_endian(open_reader(path), "t") == halves.tobytes()


@pytest.mark.parametrize("constant", [0, 1.0, 0.0078125], ids=["zero", "one", "power-of-two"])
def test_uniform_bf16_is_taken_as_big_endian(tmp_path: Path, constant: float) -> None:
    halves = np.full((64, 64), constant, "<f4").view("<u2").reshape(64, 64, 2)[..., 1]
    data = np.ascontiguousarray(halves).byteswap().view(np.uint8)
    reader = open_reader(write_gguf(tmp_path / "m.gguf", {"t": Blocks(data, GGMLQuantizationType.BF16)}, order=BIG))
    assert reader.block_order(reader.tensors["t"]) == (1, 0)


def test_blocks_that_do_not_tell_are_taken_as_they_are(tmp_path: Path) -> None:
    blocks = scaled_blocks("Q8_0")
    few = Blocks(blocks.data[:31, :34], blocks.ggml_type)
    for undecided in (few, random_blocks(TYPES["Q8_0"]), random_blocks(TYPES["MXFP4"])):
        reader = open_reader(write_gguf(tmp_path / "m.gguf", {"t": undecided}, order=BIG))
        assert reader.block_order(reader.tensors["t"]) is None


def test_bytes_have_no_order(tmp_path: Path) -> None:
    reader = open_reader(write_gguf(tmp_path / "m.gguf", {"t": np.arange(3, dtype=np.int8)}, order=BIG))
    assert reader.block_order(reader.tensors["t"]) is None


# --- which file of a folder

FILE = gguf_bytes([entry()], bytes(32))


@pytest.mark.parametrize("name", ["m.gguf", "M.GGUF", "model-00001-of-00001.gguf", "-1-of-2.gguf"])
def test_one_file_is_a_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILE)
    (tmp_path / "README.md").write_text("text")
    for source in (tmp_path, tmp_path / name):
        reader = open_reader(source)
        assert (reader.format, reader.place.folder, reader.left_out) == ("gguf", tmp_path, ())
        assert [file.path for file in reader.files] == [tmp_path / name]


@pytest.mark.parametrize(
    ("stray", "reason"),
    [
        ("mmproj.gguf", "a projector of images or sound, not the model"),
        ("mmproj-model-f16.gguf", "a projector of images or sound, not the model"),
        ("gemma-MMPROJ-f16.gguf", "a projector of images or sound, not the model"),
        ("model.imatrix.gguf", "an importance matrix, not the model"),
        ("mtp-model.gguf", "a draft model for speculative decoding, not the model"),
    ],
    ids=lambda text: text if text.endswith("gguf") else "",
)
def test_stray_file_is_left_out_and_reported(tmp_path: Path, stray: str, reason: str) -> None:
    for name in ("model.gguf", stray):
        (tmp_path / name).write_bytes(FILE)
    reader = open_reader(tmp_path)
    assert [file.path.name for file in reader.files] == ["model.gguf"]
    assert reader.left_out == (("file", stray, reason),)


def test_stray_file_alone_is_taken(tmp_path: Path) -> None:
    (tmp_path / "mmproj-f16.gguf").write_bytes(FILE)
    reader = open_reader(tmp_path)
    assert ([file.path.name for file in reader.files], reader.left_out) == (["mmproj-f16.gguf"], ())


def test_stray_file_is_taken_when_it_is_named(tmp_path: Path) -> None:
    for name in ("model.gguf", "mtp-model.gguf"):
        (tmp_path / name).write_bytes(FILE)
    assert open_reader(tmp_path / "mtp-model.gguf").files[0].path.name == "mtp-model.gguf"


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["b", "a"], r"folder: holds 2 GGUF models \(a\.gguf, b\.gguf\), name one of them"),
        (list("gfedcba"), r"holds 7 GGUF models \(a\.gguf, b\.gguf, c\.gguf, d\.gguf, e\.gguf, …\), name"),
        (["mmproj-a", "mmproj-b"], r"holds 2 GGUF models \(mmproj-a\.gguf, mmproj-b\.gguf\)"),
        (["a\n", "b"], r"holds 2 GGUF models \(a\\n\.gguf, b\.gguf\)"),
    ],
    ids=["two", "seven", "strays-alone", "control-character"],
)
def test_folder_of_several_models_is_refused(tmp_path: Path, names: list[str], problem: str) -> None:
    for name in names:
        (tmp_path / f"{name}.gguf").write_bytes(FILE)
    with pytest.raises(CheckpointError, match=problem) as caught:
        open_reader(tmp_path)
    assert_names_file(caught.value, tmp_path)


def test_file_in_a_subfolder_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "m.gguf").write_bytes(FILE)
    with pytest.raises(SourceNotFoundError, match="holds no weights itself"):
        open_reader(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_folder_with_a_safetensors_checkpoint_is_not_gguf(tmp_path: Path, name: str) -> None:
    for file in (name, "model.gguf"):
        (tmp_path / file).write_bytes(FILE)
    assert GgufReader.find(Place(tmp_path)) is None
    assert GgufReader.find(Place(tmp_path / "model.gguf")).files == ("model.gguf",)


def test_folder_called_like_a_file_is_none(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").mkdir()
    with pytest.raises(SourceNotFoundError, match="this folder holds none"):
        open_reader(tmp_path)
    (tmp_path / "model.gguf").write_bytes(FILE)
    assert [file.path.name for file in open_reader(tmp_path).files] == ["model.gguf"]


# --- hostile bytes


@pytest.mark.parametrize("content", [GOLDEN, GOLDEN_BIG], ids=["little", "big"])
def test_file_cut_at_any_byte_is_refused(scratch: Path, content: bytes) -> None:
    for length in range(len(content)):
        scratch.write_bytes(content[:length])
        with pytest.raises(CheckpointError) as caught:
            open_reader(scratch)
        assert_names_file(caught.value, scratch)


def seed_file(order: str) -> bytes:
    """Return a small file with most of what a header may hold."""
    return gguf_bytes(
        [
            entry("q", (32, 2), Q4_0, order=order),
            entry("f", (4, 2), F32, 64, order=order),
            entry("h", (5,), F16, 96, order=order),
            entry("b", (3,), BF16, 128, order=order),
        ],
        bytes(range(140)),
        kvs=[
            kv("general.architecture", "str", "llama", order=order),
            kv("general.alignment", "u32", 32, order=order),
            kv("flag", "bool", 1, order=order),
            kv("tokens", "array", ("str", ["a", "bc", ""]), order=order),
            kv("nested", "array", ("array", [("u16", [1, 2]), ("array", [("f32", [0.5])])]), order=order),
        ],
        order=order,
    )


SEEDS = {"little": seed_file("<"), "big": seed_file(">")}
NUMBERS = [
    0,
    1,
    2,
    3,
    7,
    8,
    9,
    12,
    13,
    31,
    33,
    64,
    255,
    1 << 16,
    1 << 31,
    (1 << 32) - 1,
    1 << 61,
    1 << 63,
    (1 << 64) - 1,
]


@st.composite
def mutated_files(draw: st.DrawFn) -> bytes:
    """Return a seed with a few bytes replaced, inserted or removed, often by numbers that a header may hold."""
    order = draw(st.sampled_from(list(SEEDS)))
    content = bytearray(SEEDS[order])
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(content) - 1))
        number, width = draw(st.sampled_from(NUMBERS)), draw(st.sampled_from([1, 4, 8]))
        numbers = st.just(
            number.to_bytes(8, order)[:width] if order == "little" else number.to_bytes(8, order)[-width:]
        )
        new = draw(st.one_of(st.binary(max_size=3), numbers))
        removed = draw(st.sampled_from([len(new), len(new), len(new), 0, 1]))
        content[place : place + removed] = new
    return bytes(content)


def assert_on_one_line(error: CheckpointError, path: Path) -> None:
    """Check a message that may name a key or a tensor whose mutated length took in the rest of the file."""
    assert str(error).startswith(f"{path}: ")
    assert str(error).isprintable()
    assert error.subject


@settings(max_examples=800)
@given(content=mutated_files())
def test_mutated_file_is_refused_or_wholly_readable(scratch: Path, content: bytes) -> None:
    scratch.write_bytes(content)
    try:
        reader = open_reader(scratch)
    except CheckpointError as error:
        assert_on_one_line(error, scratch)
        return
    for name in reader.tensors:
        assert len(stored(reader, name)) == reader.tensors[name].nbytes
        little_endian(reader, name)
    for array in reader.metadata.values():
        if isinstance(array, MetadataArray):
            try:
                assert len(array.read()) == len(array)
            except CheckpointError as error:
                assert_on_one_line(error, scratch)
    try:
        library = gguf.GGUFReader(os.fspath(scratch))
    except (ValueError, IndexError, KeyError, RecursionError):
        return
    assert_equals_library(reader, library)


def test_type_that_needs_a_newer_gguf_package_is_refused_with_its_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {code: known for code, known in ggml_types().items() if code < 40}
    monkeypatch.setattr("ftw.readers.gguf.header.ggml_types", lambda: known)
    with pytest.raises(CheckpointError, match=r"t: type is 40, .*; gguf 0\.19\.0 has it, as NVFP4$"):
        write(tmp_path, gguf_bytes([entry("t", (64,), 40)], bytes(36)))
