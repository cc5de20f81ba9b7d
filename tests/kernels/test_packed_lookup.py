"""Lookups of packed rows: the kernel, by Triton's interpreter, and the reference beside the gguf package."""

import numpy as np
import pytest
import torch
from kernel_launches import launch
from packed_tables import (
    DECODABLE,
    TYPES,
    assert_equal_rows,
    decoded,
    dtype_name,
    expected,
    pick,
    random_table,
    special_table,
)

import ftw
from ftw.ggml_types import PACKED_TYPES, GgmlType, ggml_types_by_name
from ftw.kernels import packed_lookup as module
from ftw.kernels.packed_lookup import packed_columns, packed_lookup, prepare

ROWS = 5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ID_DTYPES = [torch.int32, torch.int64]
COLUMNS_OF_SMALL_BLOCKS = [256, 2048, 8192, 32, 96, 576, 640, 2880]
COLUMNS_OF_LARGE_BLOCKS = [256, 2048, 8192, 768, 2560, 5120]
POISON, MARGIN = 0xA5, 64
NUM_FEW = 64  # up to so many rows are cut into shorter runs
A_FEW_TYPES = ["Q4_0", "Q6_K", "IQ3_XXS", "MXFP4"]

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu_packed runs the compiled kernel")


def columns_of(name: str) -> list[int]:
    """Return widths that the type's blocks fit, powers of two and others."""
    block_size = ggml_types_by_name()[name].block_size
    widths = COLUMNS_OF_SMALL_BLOCKS if block_size < 256 else COLUMNS_OF_LARGE_BLOCKS
    return [columns for columns in widths if columns % block_size == 0]


def at_address(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """Return a copy that begins `offset` bytes after an address that is a multiple of 64."""
    storage = torch.empty(tensor.nbytes + 128, dtype=torch.uint8)
    start = -storage.data_ptr() % 64 + offset
    copied = storage[start : start + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)
    copied.copy_(tensor)
    assert copied.data_ptr() % 64 == offset
    return copied


def run_kernel(
    table: torch.Tensor, ids: torch.Tensor, name: str, dtype: torch.dtype, *, out_offset: int = 0, first_id: int = 0
) -> torch.Tensor:
    """Run the Triton kernel by its interpreter, into memory that is poisoned before and looked at behind."""
    shape = (*ids.shape, packed_columns(table, name))
    nbytes = ids.numel() * shape[-1] * dtype.itemsize
    storage = at_address(torch.full((2 * MARGIN + nbytes,), POISON, dtype=torch.uint8), out_offset)
    out = storage[MARGIN : MARGIN + nbytes].view(dtype).reshape(shape)
    with np.errstate(all="ignore"):
        launch(table, ids, out, name, first_id=first_id)
    assert (storage[:MARGIN] == POISON).all()
    assert (storage[-MARGIN:] == POISON).all()
    return out


def run_reference(
    table: torch.Tensor, ids: torch.Tensor, name: str, dtype: torch.dtype, *, first_id: int = 0
) -> torch.Tensor:
    return packed_lookup(table, ids, name, dtype=dtype, first_id=first_id)


WAYS = {"kernel": run_kernel, "reference": run_reference}
BOTH_WAYS = [pytest.param("kernel", marks=interpreted), "reference"]


@pytest.fixture(params=["direct", "staged"])
def is_staged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Have rows staged, as those of a table in host memory are, or not, as those of one on a GPU."""
    staged: bool = request.param == "staged"
    if not staged:
        plan = module._plan

        def plan_for_a_gpu_table(table: torch.Tensor, out: torch.Tensor, known: GgmlType, columns: int) -> module._Plan:
            is_odd = table.data_ptr() % 2 == 1 and known.type_size % 2 == 0
            return plan(table, out, known, columns)._replace(is_staged=is_odd)

        monkeypatch.setattr(module, "_plan", plan_for_a_gpu_table)
    return staged


def test_every_type_that_gguf_decodes_is_looked_up() -> None:
    """A newer gguf package brings newer types; each needs a row in the table and a decoder."""
    assert set(PACKED_TYPES) == DECODABLE


@pytest.mark.parametrize("name", PACKED_TYPES)
def test_packed_type_has_a_decoder(name: str) -> None:
    from ftw.kernels.jit import ggml_decoders_triton

    assert callable(getattr(ggml_decoders_triton, f"decode_{name.lower()}", None))
    known = ggml_types_by_name()[name]
    assert known.block_size % 8 == 0
    assert not known.is_plain


def test_decoder_has_a_packed_type() -> None:
    from ftw.kernels.jit import ggml_decoders_triton

    decoders = {name for name in vars(ggml_decoders_triton) if name.startswith("decode_")}
    assert decoders == {f"decode_{name.lower()}" for name in PACKED_TYPES}


def test_row_of_q8_0_by_hand() -> None:
    block = np.concatenate([np.array([0.5], dtype="<f2").view(np.uint8), np.arange(-16, 16, dtype=np.int8).view("u1")])
    table = torch.from_numpy(block).reshape(1, 34)
    found = packed_lookup(table, torch.tensor([0, 1]), "Q8_0", dtype=torch.float32)
    assert found.tolist() == [[value / 2 for value in range(-16, 16)], [0.0] * 32]


def test_values_are_bfloat16_unless_told() -> None:
    assert packed_lookup(random_table("Q4_0", 1, 32), torch.tensor([0]), "Q4_0").dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("name", TYPES)
def test_reference_equals_gguf(name: str, dtype: torch.dtype) -> None:
    for columns in columns_of(name):
        table = random_table(name, 37, columns)
        rows = decoded(table, name)
        for id_dtype in ID_DTYPES:
            ids = torch.tensor([0, 36, -1, 5, 37, 5], dtype=id_dtype)
            assert_equal_rows(packed_lookup(table, ids, name, dtype=dtype), pick(rows, ids, dtype))
    table = special_table(name, 2048)
    ids = torch.arange(table.shape[0])
    assert_equal_rows(packed_lookup(table, ids, name, dtype=dtype), expected(table, ids, name, dtype))


@interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("name", TYPES)
def test_kernel_equals_gguf(name: str, dtype: torch.dtype, is_staged: bool) -> None:
    """In units of 4, 2 and 1 bytes, as the table's address and the output's allow."""
    table = random_table(name, ROWS, 512)
    ids = torch.tensor([4, -1, 1])
    wanted = expected(table, ids, name, dtype)
    out_offsets = (0, 2) if dtype.itemsize == 2 else (0,)
    # Blocks of an odd number of bytes are read byte by byte; others need words, and are staged at odd addresses.
    cases = [(0, out_offset) for out_offset in out_offsets] + [(2, 0), (1, 0)]
    for table_offset, out_offset in cases if is_staged else [(0, 0), (1, 0)]:
        found = run_kernel(at_address(table, table_offset), ids, name, dtype, out_offset=out_offset)
        assert_equal_rows(found, wanted)


@interpreted
@pytest.mark.parametrize("name", TYPES)
def test_kernel_equals_gguf_in_any_width(name: str, is_staged: bool) -> None:
    for number, columns in enumerate(columns_of(name)):
        table = random_table(name, ROWS, columns, seed=columns)
        ids = torch.tensor([number % ROWS], dtype=ID_DTYPES[number % 2])
        found = run_kernel(table, ids, name, torch.bfloat16)
        assert_equal_rows(found, expected(table, ids, name, torch.bfloat16))


@interpreted
@pytest.mark.parametrize("name", TYPES)
def test_kernel_decodes_special_scales(name: str, is_staged: bool) -> None:
    table = special_table(name, 4096)
    ids, dtype = torch.arange(table.shape[0]), torch.bfloat16 if is_staged else torch.float32
    assert_equal_rows(run_kernel(table, ids, name, dtype), expected(table, ids, name, dtype))


@interpreted
@pytest.mark.parametrize("count", [NUM_FEW, NUM_FEW + 1])
@pytest.mark.parametrize("name", ["Q4_0", "MXFP4"])
def test_kernel_takes_few_and_many_ids(name: str, count: int) -> None:
    table = random_table(name, ROWS, 96)
    ids = torch.arange(count) % (ROWS + 2) - 1
    assert_equal_rows(run_kernel(table, ids, name, torch.float16), expected(table, ids, name, torch.float16))


@pytest.mark.parametrize("way", BOTH_WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("id_dtype", ID_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("name", A_FEW_TYPES)
def test_ids_outside_give_positive_zeros(
    name: str, id_dtype: torch.dtype, dtype: torch.dtype, way: str, is_staged: bool
) -> None:
    """Also where the first row, which the kernel decodes in their stead, is not finite."""
    table = random_table(name, ROWS, 256)
    table[0] = 0xFF
    extremes = torch.iinfo(id_dtype)
    ids = torch.tensor([-1, ROWS, extremes.min, extremes.max, -ROWS, extremes.max // 2], dtype=id_dtype)
    found = WAYS[way](table, ids, name, dtype)
    assert not found.view(torch.uint8).count_nonzero()


@pytest.mark.parametrize("way", BOTH_WAYS)
@pytest.mark.parametrize("id_dtype", ID_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("first_id", [1, 16, 2**31, 2**63 - 1], ids=str)
@pytest.mark.parametrize("name", A_FEW_TYPES)
def test_lookup_begins_at_the_first_id(
    name: str, first_id: int, id_dtype: torch.dtype, way: str, is_staged: bool
) -> None:
    """Also for ids that wrap around where the first one is taken from them."""
    table = random_table(name, ROWS, 256)
    extremes = torch.iinfo(id_dtype)
    near = [first_id + row for row in (-1, 0, ROWS - 1, ROWS)]
    values = [*near, extremes.min, extremes.min + first_id, -1, 0, ROWS - 1, extremes.max]
    values = [value for value in values if extremes.min <= value <= extremes.max]
    found = WAYS[way](table, torch.tensor(values, dtype=id_dtype), name, torch.float32, first_id=first_id)
    rows = torch.tensor([value - first_id if 0 <= value - first_id < ROWS else -1 for value in values])
    assert_equal_rows(found, expected(table, rows, name, torch.float32))


def test_lookup_refuses_a_first_id() -> None:
    with pytest.raises(ftw.LookupArgumentError, match="packed_lookup: first_id: found -1"):
        packed_lookup(torch.zeros(4, 34, dtype=torch.uint8), torch.tensor([0]), "Q8_0", first_id=-1)


@pytest.mark.parametrize("way", BOTH_WAYS)
@pytest.mark.parametrize(
    "ids",
    [
        pytest.param(torch.tensor(3), id="scalar"),
        pytest.param(torch.arange(12).reshape(2, 3, 2), id="three_dimensions"),
        pytest.param(torch.arange(16).reshape(4, 4).T, id="transposed"),
        pytest.param(torch.arange(12)[::3], id="strided"),
        pytest.param(torch.tensor([2]).expand(5), id="expanded"),
        pytest.param(torch.arange(12, dtype=torch.int32).reshape(3, 4)[:, 1:3], id="slice"),
    ],
)
def test_ids_of_any_shape_and_strides(ids: torch.Tensor, way: str) -> None:
    table = random_table("Q5_1", 11, 64)
    found = WAYS[way](table, ids, "Q5_1", torch.float32)
    assert_equal_rows(found, expected(table, ids, "Q5_1", torch.float32))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)], ids=str)
def test_no_ids_give_no_rows(shape: tuple[int, ...]) -> None:
    found = packed_lookup(random_table("Q4_K", ROWS, 256), torch.empty(shape, dtype=torch.int64), "Q4_K")
    assert found.shape == (*shape, 256)


def test_table_without_rows_gives_zeros() -> None:
    found = packed_lookup(torch.empty(0, 144, dtype=torch.uint8), torch.tensor([[0, -1, 7]]), "Q4_K")
    assert found.shape == (1, 3, 256)
    assert not found.view(torch.int16).count_nonzero()


def test_table_without_columns_gives_empty_rows() -> None:
    table = torch.empty(3, 0, dtype=torch.uint8)
    assert packed_lookup(table, torch.tensor([0, 9]), "Q4_K").shape == (2, 0)


def test_lookup_leaves_table_and_ids_alone() -> None:
    table, ids = random_table("Q2_K", ROWS, 256), torch.tensor([1, -1, 99])
    before = table.clone(), ids.clone()
    packed_lookup(table, ids, "Q2_K")
    assert torch.equal(table, before[0])
    assert torch.equal(ids, before[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_lookup_fills_out(dtype: torch.dtype) -> None:
    table, ids = random_table("IQ4_NL", ROWS, 96), torch.tensor([[1, 2], [3, 99]])
    out = torch.full((2, 2, 96), 7, dtype=dtype)
    assert packed_lookup(table, ids, "IQ4_NL", dtype=dtype, out=out) is out
    assert_equal_rows(out, expected(table, ids, "IQ4_NL", dtype))


@pytest.mark.parametrize("name", ["F32", "BF16", "I8", "Q8_1", "Q8_K", "Q1_0", "q4_0", "Q4_9", ""])
def test_lookup_refuses_a_type_without_decoder(name: str) -> None:
    with pytest.raises(ftw.LookupArgumentError, match=f"ggml_type: found '{name}', allowed are Q4_0, ") as caught:
        packed_lookup(torch.zeros(4, 720, dtype=torch.uint8), torch.tensor([0]), name)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("table", "words"),
    [
        pytest.param(torch.zeros(4, 35, dtype=torch.uint8), "whole blocks of 34 bytes", id="part_of_a_block"),
        pytest.param(torch.zeros(4, 34, dtype=torch.int8), "found torch.int8", id="int8"),
        pytest.param(torch.zeros(4, 34), "found torch.float32", id="float32"),
        pytest.param(torch.zeros(34, dtype=torch.uint8), "table: found", id="one_dimension"),
        pytest.param(torch.zeros(4, 68, dtype=torch.uint8)[:, :34], "contiguous", id="sliced"),
    ],
)
def test_lookup_refuses_a_table(table: torch.Tensor, words: str) -> None:
    with pytest.raises(ftw.LookupArgumentError, match=words) as caught:
        packed_lookup(table, torch.tensor([0]), "Q8_0")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        pytest.param(torch.tensor([0.0]), "ids: found torch.float32", id="float"),
        pytest.param(torch.tensor([0], dtype=torch.uint8), "ids: found torch.uint8", id="uint8"),
        pytest.param(torch.empty(1, dtype=torch.int64, device="meta"), "meta", id="meta"),
        pytest.param([0], "ids: found a list", id="list"),
    ],
)
def test_lookup_refuses_ids(ids: torch.Tensor, words: str) -> None:
    with pytest.raises(ftw.LookupArgumentError, match=words):
        packed_lookup(torch.zeros(4, 34, dtype=torch.uint8), ids, "Q8_0")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.uint8, torch.float8_e4m3fn], ids=dtype_name)
def test_lookup_refuses_a_dtype(dtype: torch.dtype) -> None:
    with pytest.raises(ftw.LookupArgumentError, match=f"dtype: found {dtype}, allowed are torch.float32, "):
        packed_lookup(torch.zeros(4, 34, dtype=torch.uint8), torch.tensor([0]), "Q8_0", dtype=dtype)


@pytest.mark.parametrize(
    "out",
    [
        pytest.param(torch.empty(2, 33, dtype=torch.bfloat16), id="shape"),
        pytest.param(torch.empty(2, 34, dtype=torch.uint8), id="packed_shape"),
        pytest.param(torch.empty(2, 32, dtype=torch.float16), id="dtype"),
        pytest.param(torch.empty(32, 2, dtype=torch.bfloat16).T, id="strides"),
        pytest.param(torch.empty(2, 32, dtype=torch.bfloat16, device="meta"), id="device"),
    ],
)
def test_lookup_refuses_out(out: torch.Tensor) -> None:
    with pytest.raises(ftw.LookupArgumentError, match=r"packed_lookup: out: .* is needed"):
        packed_lookup(torch.zeros(4, 34, dtype=torch.uint8), torch.tensor([0, 1]), "Q8_0", out=out)


@pytest.mark.parametrize("name", TYPES)
def test_plan_cuts_rows_into_whole_blocks(name: str) -> None:
    known = ggml_types_by_name()[name]
    for columns in columns_of(name):
        for count in (1, NUM_FEW, NUM_FEW + 1, 300):
            table = at_address(random_table(name, 1, columns), 0)
            out = at_address(torch.empty(count, columns, dtype=torch.bfloat16), 0)
            plan = module._plan(table, out, known, columns)
            assert plan.elements & (plan.elements - 1) == 0
            assert plan.elements % known.block_size == 0
            assert plan.is_staged
            assert plan.elements <= (1024 if count <= NUM_FEW else 2048)
            run_nbytes = known.row_nbytes(min(plan.elements, columns))
            assert run_nbytes % plan.unit_nbytes == 0
            assert plan.units & (plan.units - 1) == 0
            assert plan.units * plan.unit_nbytes >= run_nbytes + 128 - plan.unit_nbytes


@pytest.mark.parametrize(
    ("name", "table_offset", "out_offset", "unit_nbytes"),
    [("Q4_0", 0, 0, 4), ("Q4_0", 2, 0, 2), ("Q4_0", 0, 2, 2), ("Q4_0", 1, 0, 1), ("Q6_K", 0, 0, 2), ("MXFP4", 0, 0, 1)],
    ids=["aligned", "table_at_2", "out_at_2", "table_at_1", "rows_of_210", "rows_of_17"],
)
def test_plan_takes_the_widest_unit(name: str, table_offset: int, out_offset: int, unit_nbytes: int) -> None:
    known = ggml_types_by_name()[name]
    columns = 256 if name == "Q6_K" else 32 if name == "MXFP4" else 64
    table = at_address(random_table(name, 2, columns), table_offset)
    out = at_address(torch.empty(300, columns, dtype=torch.bfloat16), out_offset)
    assert module._plan(table, out, known, columns).unit_nbytes == unit_nbytes


def test_preparing_a_cpu_does_nothing() -> None:
    prepare("IQ2_S", torch.device("cpu"))
