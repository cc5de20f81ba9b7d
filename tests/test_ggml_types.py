"""GGUF's element types: the gguf package's codes, names and sizes, and blocks of the other byte order."""

import subprocess
import sys
from importlib.metadata import version
from itertools import chain

import gguf
import pytest
from gguf import GGMLQuantizationType

from ftw.dtypes import DTYPES
from ftw.ggml_types import (
    LATER_TYPES,
    PACKED_TYPES,
    GgmlType,
    file_type_name,
    ggml_types,
    ggml_types_by_name,
    swapped_block,
    unknown_type,
)

PLAIN = ("F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64")
UNKNOWN_FIELDS = sorted(set(ggml_types_by_name()) - set(PLAIN) - set(PACKED_TYPES))
GGUF_RELEASE = tuple(int(part) for part in version("gguf").split(".")[:3])


def test_types_are_those_of_the_gguf_package() -> None:
    expected = {
        int(kind): GgmlType(int(kind), kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType
    }
    assert ggml_types() == expected
    assert ggml_types_by_name() == {known.name: known for known in expected.values()}


def test_later_types_are_there_from_the_release_on_that_is_named() -> None:
    for name, (code, release) in LATER_TYPES.items():
        is_due = tuple(map(int, release.split("."))) <= GGUF_RELEASE
        assert (code in ggml_types(), name in ggml_types_by_name()) == (is_due, is_due)
        assert not is_due or ggml_types()[code].name == name


def test_later_type_is_unknown_with_the_release_that_has_it() -> None:
    expected = "which the installed gguf package does not know; gguf 0.19.0 has it, as NVFP4"
    assert (unknown_type(40), unknown_type("NVFP4")) == (expected, expected)


def test_type_that_no_release_has_is_unknown_without_one() -> None:
    assert unknown_type(99) == "which the installed gguf package does not know"


def test_plain_types_are_those_whose_elements_lie_one_by_one() -> None:
    plain = [known for known in ggml_types().values() if known.is_plain]
    assert sorted(known.name for known in plain) == sorted(PLAIN)
    assert all(known.type_size * 8 == DTYPES[known.name].bits for known in plain)


@pytest.mark.oracle("gguf", "0.19")
def test_packed_types_are_all_that_the_gguf_package_decodes() -> None:
    decoded = {kind.name for kind in gguf.quants._type_traits} - {"BF16"}  # type: ignore[attr-defined]
    assert set(PACKED_TYPES) == decoded


@pytest.mark.parametrize(
    ("name", "columns", "nbytes"),
    [("F32", 7, 28), ("Q8_0", 576, 612), ("Q4_0", 32, 18), ("Q6_K", 2048, 1680), ("NVFP4", 128, 72), ("Q4_K", 0, 0)],
    ids=lambda value: str(value),
)
def test_row_takes_whole_blocks(name: str, columns: int, nbytes: int) -> None:
    assert ggml_types_by_name()[name].row_nbytes(columns) == nbytes


@pytest.mark.parametrize("name", [*PLAIN, *PACKED_TYPES])
def test_swapped_block_swapped_again_is_the_block(name: str) -> None:
    order = swapped_block(ggml_types_by_name()[name])
    assert order is not None
    assert [order[place] for place in order] == list(range(ggml_types_by_name()[name].type_size))


@pytest.mark.parametrize("name", PACKED_TYPES)
def test_swapped_block_moves_the_bytes_of_wide_fields_alone(name: str) -> None:
    known = ggml_types_by_name()[name]
    order = swapped_block(known)
    assert order is not None
    wide = {
        byte for field in PACKED_TYPES[name] for byte in range(field.offset, field.offset + field.width * field.number)
    }
    assert wide <= set(range(known.type_size))
    assert {place for place, source in enumerate(order) if place != source} == wide
    for field in PACKED_TYPES[name]:
        for start in range(field.offset, field.offset + field.width * field.number, field.width):
            assert order[start : start + field.width] == tuple(range(start + field.width - 1, start - 1, -1))


@pytest.mark.parametrize("name", PACKED_TYPES)
def test_wide_fields_do_not_overlap(name: str) -> None:
    fields = PACKED_TYPES[name]
    places = list(chain(*(range(field.offset, field.offset + field.width * field.number) for field in fields)))
    assert len(places) == len(set(places))


@pytest.mark.parametrize("name", UNKNOWN_FIELDS)
def test_block_of_a_type_without_known_fields_is_not_swapped(name: str) -> None:
    assert swapped_block(ggml_types_by_name()[name]) is None


@pytest.mark.parametrize(
    ("code", "name"),
    [
        *[(0, "F32"), (1, "F16"), (2, "Q4_0"), (15, "Q4_K_M"), (19, "IQ2_XXS"), (32, "BF16")],
        pytest.param(38, "MXFP4_MOE", marks=pytest.mark.oracle("gguf", "0.19")),
    ],
    ids=lambda value: str(value),
)
def test_file_type_is_named(code: int, name: str) -> None:
    assert file_type_name(code) == name


@pytest.mark.parametrize(
    "code", [None, -1, 4, 1 << 40, "Q4_0", [2], {}, 2.5], ids=["none", "-1", "4", "huge", "text", "list", "dict", "2.5"]
)
def test_file_type_that_does_not_tell_has_no_name(code: object) -> None:
    assert file_type_name(code) == ""


def test_types_are_known_without_torch_numpy_and_the_rest_of_gguf() -> None:
    code = """
import sys
from ftw.ggml_types import PACKED_TYPES, file_type_name, ggml_types, ggml_types_by_name, swapped_block
assert len(ggml_types()) > 30 and file_type_name(2) == "Q4_0" and swapped_block(ggml_types_by_name()["Q4_0"])
print(sorted({"torch", "numpy", "gguf", "triton"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")
