"""The type table, held against torch and the safetensors library."""

import pytest
import safetensors
import torch
from builders import safetensors_bytes, tensor_entry

from ftw.dtypes import (
    BY_TORCH_NAME,
    DTYPES,
    FLOAT8_DTYPES,
    FLOAT_DTYPES,
    is_too_large,
    shape_of_torch,
    tensor_bits,
    torch_shape,
)

# What an FTW index may name.
FTW_NAMES = """bfloat16 float16 float32 float64 uint8 int8 int16 int32 int64 bool
    float8_e4m3fn float8_e5m2 float8_e8m0fnu""".split()
NEWER = {"float4_e2m1fn_x2"}  # than the oldest torch that is allowed


HERE = [name for name in BY_TORCH_NAME if hasattr(torch, name) or name not in NEWER]


@pytest.mark.parametrize("name", HERE, ids=str)
def test_torch_has_the_type_in_that_width(name: str) -> None:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    assert str(dtype) == f"torch.{name}"
    assert dtype.itemsize * 8 == BY_TORCH_NAME[name].bits * BY_TORCH_NAME[name].torch_elements


def test_types_that_torch_has_have_its_names() -> None:
    from safetensors.torch import _TYPES

    named = {name: f"torch.{dtype.torch_name}" for name, dtype in DTYPES.items() if dtype.torch_name}
    told = {name: str(dtype) for name, dtype in _TYPES.items() if dtype is not None}
    assert {name: named.get(name) for name in told} == told


@pytest.mark.parametrize(
    ("name", "shape", "there"),
    [("F4", [3, 8], (3, 4)), ("F4", [0], (0,)), ("F4", [3, 7], None), ("F4", [], None), ("BF16", [3, 7], (3, 7))],
    ids=["matrix", "empty", "odd", "scalar", "plain"],
)
def test_shape_in_torch_and_back(name: str, shape: list[int], there: tuple[int, ...] | None) -> None:
    assert torch_shape(DTYPES[name], shape) == there
    if there is not None:
        assert shape_of_torch(DTYPES[name], there) == tuple(shape)


@pytest.mark.parametrize("name", DTYPES, ids=str)
def test_library_has_the_type_in_that_width(name: str) -> None:
    nbytes = DTYPES[name].bits
    content = safetensors_bytes({"t": tensor_entry(name, [8], 0, nbytes)}, bytes(nbytes))
    assert safetensors.deserialize(content)[0][1]["dtype"] == name


def test_table_is_keyed_by_name_without_doubles() -> None:
    assert all(name == dtype.name for name, dtype in DTYPES.items())
    assert len(BY_TORCH_NAME) == sum(dtype.torch_name is not None for dtype in DTYPES.values())


def test_every_type_of_the_ftw_format_has_a_row() -> None:
    assert set(FTW_NAMES) <= set(BY_TORCH_NAME)


def test_float_types_are_torch_float_types() -> None:
    floats = {
        name
        for name, row in DTYPES.items()
        if row.torch_name in HERE and getattr(torch, row.torch_name).is_floating_point
    }
    assert floats - {"F8_E8M0", "F4"} == FLOAT_DTYPES | FLOAT8_DTYPES


@pytest.mark.parametrize(
    ("dtype", "shape", "bits"),
    [("F32", [], 32), ("BF16", [3, 5], 240), ("F4", [3], 12), ("I64", [0, 9], 0), ("U8", [1 << 40, 1 << 40], 8 << 80)],
    ids=["scalar", "matrix", "below-a-byte", "empty", "beyond-64-bits"],
)
def test_tensor_bits_are_exact(dtype: str, shape: list[int], bits: int) -> None:
    assert tensor_bits(DTYPES[dtype], shape) == bits


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ([], False),
        ([0], False),
        ([(1 << 63) - 1], False),
        ([1 << 63], True),
        ([1 << 32, 1 << 31], True),
        ([0, 1 << 62, 2], True),
        ([10**4000] * 100_000, True),
        ([1] * 100_000, False),
    ],
    ids=["scalar", "empty", "largest", "one-more", "product", "behind-zero", "hostile", "ones"],
)
def test_shape_is_too_large_from_2_to_the_63_on(shape: list[int], expected: bool) -> None:
    assert is_too_large(shape) is expected
