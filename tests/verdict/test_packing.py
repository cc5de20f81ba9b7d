"""Packing: what a checkpoint records of packed rows, what is worked out where it does not, and what is then refused."""

from typing import Any

import pytest

from ftw.checkpoint.config import ModelConfig
from ftw.ggml_types import PACKED_TYPES, ggml_types_by_name
from ftw.tensors import TensorInfo
from ftw.verdict.packing import Packing, UnknownPackingError, find_packing

FILE_TYPES = {
    "F32": 0, "Q4_0": 2, "Q8_0": 7, "Q5_0": 8, "Q3_K_M": 12, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18,
    "IQ2_XXS": 19, "IQ4_NL": 25, "IQ3_S": 26, "IQ4_XS": 30, "TQ1_0": 36, "TQ2_0": 37, "MXFP4_MOE": 38, "NVFP4": 39,
}  # fmt: skip


def tensor(shape: tuple[int, ...], **options: Any) -> TensorInfo:
    return TensorInfo(**{"name": "t", "dtype": "U8", "shape": shape, "offset": 0, "nbytes": 0, **options})


def config(columns: int | None = 64, tokens: int | None = 10, file_type: object = None, **options: Any) -> ModelConfig:
    raw = {} if file_type is None else {"general.file_type": file_type}
    facts: dict[str, Any] = {"hidden_size": columns, "vocab_size": tokens, "is_gguf": True, "raw": raw, **options}
    return ModelConfig(**facts)


def refusal(found: TensorInfo, where: ModelConfig) -> str:
    with pytest.raises(UnknownPackingError) as caught:
        find_packing(found, where)
    return str(caught.value)


# recorded


@pytest.mark.parametrize("is_gguf", [True, False], ids=["gguf", "without-metadata"])
@pytest.mark.parametrize("name", PACKED_TYPES)
def test_recorded_packing_is_believed(name: str, is_gguf: bool) -> None:
    known = ggml_types_by_name()[name]
    row = 2 * known.type_size
    found = tensor((12, row), ggml_type=name, logical_shape=(10, 2 * known.block_size))
    assert find_packing(found, ModelConfig(is_gguf=is_gguf)) == Packing(name, 10, 2 * known.block_size)


def test_recorded_packing_counts_before_the_metadata() -> None:
    found = tensor((10, 68), ggml_type="Q8_0", logical_shape=(10, 64))
    assert find_packing(found, config(columns=999, tokens=3, file_type=2)) == Packing("Q8_0", 10, 64)


@pytest.mark.parametrize("name", ["Q8_1", "Q8_K", "Q1_0", "F32", "Q9_9", ""])
def test_recorded_type_that_is_not_looked_up_is_refused(name: str) -> None:
    found = tensor((10, 80), ggml_type=name, logical_shape=(10, 64))
    assert refusal(found, config()) == f"its rows are packed as {name}, which no lookup unpacks"


def test_recorded_type_that_needs_a_newer_gguf_package_is_refused_with_its_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ftw.verdict.packing.ggml_types_by_name", dict)
    found = tensor((10, 36), ggml_type="NVFP4", logical_shape=(10, 64))
    expected = (
        "its rows are packed as NVFP4, which the installed gguf package does not know; gguf 0.19.0 has it, as NVFP4"
    )
    assert refusal(found, config()) == expected


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, "U8 [10, 68] with logical_shape None"),
        ({"logical_shape": (640,)}, "U8 [10, 68] with logical_shape [640]"),
        ({"logical_shape": (2, 5, 64)}, "U8 [10, 68] with logical_shape [2, 5, 64]"),
        ({"logical_shape": ()}, "U8 [10, 68] with logical_shape "),
        ({"logical_shape": (10, 64), "dtype": "F16"}, "F16 [10, 68] with logical_shape [10, 64]"),
        ({"logical_shape": (10, 64), "shape": (680,)}, "U8 [680] with logical_shape [10, 64]"),
        ({"logical_shape": (10, 64), "shape": (1, 10, 68)}, "U8 [1, 10, 68] with logical_shape [10, 64]"),
    ],
    ids=["no-shape", "vector", "three-dimensions", "scalar", "no-bytes", "flat", "stacked"],
)
def test_recorded_packing_that_is_no_matrix_is_refused(options: dict[str, Any], shown: str) -> None:
    found = tensor(options.pop("shape", (10, 68)), ggml_type="Q8_0", **options)
    assert refusal(found, config()).startswith(f"its rows are packed as Q8_0, but it is {shown}")


@pytest.mark.parametrize(
    ("shape", "logical_shape"),
    [((10, 68), (10, 63)), ((10, 68), (10, 32)), ((10, 67), (10, 64)), ((10, 68), (11, 64)), ((10, 0), (10, 64))],
    ids=["half-block", "narrow", "odd-bytes", "more-rows", "no-bytes"],
)
def test_recorded_packing_that_does_not_fit_is_refused(shape: tuple[int, int], logical_shape: tuple[int, int]) -> None:
    found = tensor(shape, ggml_type="Q8_0", logical_shape=logical_shape)
    assert refusal(found, config()) == (
        "its rows are packed as Q8_0, of which 34 bytes hold 32 values, "
        f"but it is {list(shape)} with logical_shape {list(logical_shape)}"
    )


# not packed


@pytest.mark.parametrize(
    ("found", "where"),
    [
        (tensor((10, 64), dtype="BF16"), config()),
        (tensor((10, 64), dtype="I8"), config()),
        (tensor((10, 68)), config(is_gguf=False)),
        (tensor((680,)), config()),
        (tensor((10, 68, 1)), config()),
    ],
    ids=["bf16", "i8", "no-gguf", "flat", "three-dimensions"],
)
def test_other_tensors_are_not_packed(found: TensorInfo, where: ModelConfig) -> None:
    assert find_packing(found, where) is None


# worked out


def unambiguous(columns: int) -> dict[str, int]:
    """Return the types whose rows of so many values take bytes that no other type's do."""
    sizes = {
        name: ggml_types_by_name()[name].row_nbytes(columns)
        for name in PACKED_TYPES
        if columns % ggml_types_by_name()[name].block_size == 0
    }
    return {name: nbytes for name, nbytes in sizes.items() if list(sizes.values()).count(nbytes) == 1}


@pytest.mark.parametrize(("name", "row"), unambiguous(512).items(), ids=unambiguous(512))
def test_width_that_one_type_has_tells_it(name: str, row: int) -> None:
    assert find_packing(tensor((10, row)), config(512)) == Packing(name, 10, 512)


def test_most_types_are_told_by_their_width() -> None:
    assert sorted(set(PACKED_TYPES) - set(unambiguous(512))) == [
        "IQ2_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4", "Q3_K", "Q4_0", "Q4_K", "Q5_0", "Q5_K", "TQ2_0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "columns", "file_type"),
    [
        ("Q4_0", 512, "Q4_0"), ("Q4_K", 512, "Q4_K_M"), ("Q4_K", 512, "Q4_K_S"), ("IQ4_NL", 512, "IQ4_NL"),
        ("NVFP4", 512, "NVFP4"), ("Q5_K", 512, "Q5_K_M"), ("Q5_0", 512, "Q5_0"), ("Q3_K", 512, "Q3_K_M"),
        ("IQ3_S", 512, "IQ3_S"), ("Q4_K", 512, "TQ1_0"), ("Q4_K", 512, "TQ2_0"), ("IQ2_XXS", 512, "IQ2_XXS"),
        ("Q4_0", 96, "Q4_0"), ("IQ4_NL", 96, "IQ4_NL"),
    ],
    ids=lambda value: str(value),
)  # fmt: skip
def test_file_type_settles_a_width_that_several_types_have(name: str, columns: int, file_type: str) -> None:
    found = tensor((12, ggml_types_by_name()[name].row_nbytes(columns)))
    where = config(columns, 12, FILE_TYPES[file_type])
    assert find_packing(found, where) == Packing(name, 12, columns)


@pytest.mark.parametrize(
    ("file_type", "told"),
    [(None, "is missing"), (FILE_TYPES["Q6_K"], "is Q6_K"), (FILE_TYPES["F32"], "is F32"), (999, "is missing"),
     ("Q4_0", "is missing"), (FILE_TYPES["IQ4_XS"], "is IQ4_XS")],
    ids=["missing", "other", "plain", "unknown", "text", "prefix-of-none"],
)  # fmt: skip
def test_width_that_several_types_have_is_refused_where_nothing_settles_it(file_type: object, told: str) -> None:
    assert refusal(tensor((10, 288)), config(512, 10, file_type)) == (
        "its index records no ggml_type; rows of 288 bytes for 512 values may be Q4_0 or Q4_K or IQ4_NL or NVFP4, "
        f"and general.file_type {told}; convert it with ftw"
    )


@pytest.mark.parametrize("row", [1, 63, 287, 4096], ids=str)
def test_width_that_no_type_has_is_refused(row: int) -> None:
    assert refusal(tensor((10, row)), config(512)) == (
        f"its index records no ggml_type; rows of {row} bytes for 512 values are of no type that is looked up"
    )


def test_type_whose_blocks_do_not_divide_the_width_is_not_considered() -> None:
    """A row of 576 values is no whole number of Q5_K's blocks, so its bytes are Q5_0's."""
    assert find_packing(tensor((11, 396)), config(576)) == Packing("Q5_0", 10, 576)


@pytest.mark.parametrize("columns", [None, 0], ids=str)
def test_unknown_width_is_refused(columns: int | None) -> None:
    assert refusal(tensor((10, 68)), config(columns)) == (
        "its index records no ggml_type, and the metadata no embedding_length to find it by"
    )


# FreeToken appends ceil((512 - columns % 512) / columns) rows of zeros where columns is no multiple of 512
@pytest.mark.parametrize(
    ("columns", "padding"), [(32, 15), (64, 7), (160, 3), (192, 2), (256, 1), (576, 1), (640, 1), (2560, 0), (512, 0)],
    ids=str,
)  # fmt: skip
def test_padding_rows_are_not_the_tables(columns: int, padding: int) -> None:
    row = ggml_types_by_name()["Q8_0"].row_nbytes(columns)
    assert find_packing(tensor((10 + padding, row)), config(columns, 10)) == Packing("Q8_0", 10, columns)


def test_table_without_padding_has_as_many_rows_as_tokens() -> None:
    assert find_packing(tensor((10, 68)), config(64, 10)) == Packing("Q8_0", 10, 64)


@pytest.mark.parametrize(
    "tokens", [9, 11, 18, 1], ids=["one-less", "one-more", "more-than-stored", "one"]
)  # fmt: skip
def test_rows_that_the_count_of_tokens_does_not_explain_are_refused(tokens: int) -> None:
    assert refusal(tensor((17, 68)), config(64, tokens)) == (
        f"its index records no logical_shape: of its 17 rows 7 may be padding, and the metadata tell of {tokens} tokens"
    )


@pytest.mark.parametrize("tokens", [9, 11, None], ids=str)
def test_rows_of_a_width_that_is_not_padded_count_themselves(tokens: int | None) -> None:
    row = ggml_types_by_name()["Q8_0"].row_nbytes(512)
    assert find_packing(tensor((10, row)), config(512, tokens)) == Packing("Q8_0", 10, 512)


@pytest.mark.parametrize("stored", [1, 7, 17], ids=str)
def test_rows_are_refused_where_the_metadata_have_no_count_of_tokens(stored: int) -> None:
    message = refusal(tensor((stored, 68)), config(64, None))
    assert message.startswith("its index records no logical_shape")
    assert "None" not in message
