"""Lookups of plain rows: the kernel, by Triton's interpreter, and the reference beside plain Python."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_launches import launch

import ftw
from ftw.kernels.lookup import lookup
from ftw.kernels.operation import LookupOptions
from ftw.kernels.reference import lookup_reference
from ftw.kernels.row_tiling import tile_row
from ftw.lookup.embedding import HostEmbedding

ROWS = 37
WIDTHS = [1, 2, 3, 16, 33, 128, 1000, 2048, 2560, 2880, 5001]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]


def random_table(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a table of random bits, so that NaNs with payloads, infinities and denormals are among them."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = columns * torch.empty(0, dtype=dtype).element_size()
    if not rows * columns:
        return torch.empty(rows, columns, dtype=dtype)
    return torch.randint(0, 256, (rows, nbytes), dtype=torch.uint8, generator=generator).view(dtype)


def expected_bytes(table: torch.Tensor, ids: torch.Tensor, first_id: int = 0) -> bytes:
    """Look rows up one by one, in Python, in bytes."""
    rows = [bytes(row.tolist()) for row in table.view(torch.uint8)]
    zeros = bytes(len(rows[0])) if rows else bytes(table.shape[1] * table.element_size())
    numbers = [token - first_id for token in ids.reshape(-1).tolist()]
    return b"".join(rows[row] if 0 <= row < len(rows) else zeros for row in numbers)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).reshape(-1).tolist())


def run_kernel(table: torch.Tensor, ids: torch.Tensor, first_id: int = 0) -> torch.Tensor:
    """Run the Triton kernel, by its interpreter where there is no GPU, into memory that is poisoned before."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table, ids = table.to(device), ids.to(device)
    out = torch.full((*ids.shape, table.shape[1] * table.element_size()), 0xA5, dtype=torch.uint8, device=device)
    launch(table, ids, out.view(table.dtype), first_id=first_id)
    return out.view(table.dtype).cpu()


WAYS = {
    "kernel": run_kernel,
    "reference": lambda table, ids, first_id=0: lookup(table, ids, first_id=first_id),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("columns", WIDTHS)
def test_lookup_returns_rows_bit_for_bit(columns: int, dtype: torch.dtype, way: str) -> None:
    table = random_table(ROWS, columns, dtype)
    ids = torch.tensor([0, 5, ROWS - 1, 5])
    found = WAYS[way](table, ids)
    assert found.dtype == dtype
    assert found.shape == (4, columns)
    assert as_bytes(found) == expected_bytes(table, ids)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_lookup_gives_zeros_for_ids_outside(id_dtype: torch.dtype, way: str) -> None:
    table = random_table(ROWS, 33, torch.bfloat16)
    extremes = torch.iinfo(id_dtype)
    ids = torch.tensor([-1, 0, ROWS, ROWS - 1, extremes.min, extremes.max, -ROWS], dtype=id_dtype)
    assert as_bytes(WAYS[way](table, ids)) == expected_bytes(table, ids)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("first_id", [1, 5, 16, 2**31 - 5, 2**31, 2**40 + 3, 2**63 - 1], ids=str)
def test_lookup_begins_at_the_first_id(first_id: int, id_dtype: torch.dtype, way: str) -> None:
    """Also for ids that wrap around where the first one is taken from them."""
    table = random_table(ROWS, 33, torch.bfloat16)
    extremes = torch.iinfo(id_dtype)
    near = [first_id + row for row in (-1, 0, 1, ROWS - 1, ROWS)]
    far = [extremes.min + offset for offset in (0, 1, first_id - 1, first_id, first_id + ROWS)]
    values = [*near, *far, -1, 0, ROWS - 1, extremes.max, extremes.max - 1]
    ids = torch.tensor([value for value in values if extremes.min <= value <= extremes.max], dtype=id_dtype)
    assert as_bytes(WAYS[way](table, ids, first_id)) == expected_bytes(table, ids, first_id)


@pytest.mark.parametrize("first_id", [-1, 2**63], ids=str)
def test_lookup_refuses_a_first_id(first_id: int) -> None:
    with pytest.raises(ftw.LookupArgumentError, match="lookup: first_id: found"):
        lookup(torch.zeros(4, 4), torch.tensor([0]), first_id=first_id)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "ids",
    [
        pytest.param(torch.tensor(3), id="scalar"),
        pytest.param(torch.arange(12).reshape(2, 3, 2), id="three_dimensions"),
        pytest.param(torch.arange(36).reshape(6, 6).T, id="transposed"),
        pytest.param(torch.arange(36)[::3], id="strided"),
        pytest.param(torch.tensor([7]).expand(5), id="expanded"),
        pytest.param(torch.arange(12, dtype=torch.int32).reshape(3, 4)[:, 1:3], id="slice"),
    ],
)
def test_lookup_takes_ids_of_any_shape_and_strides(ids: torch.Tensor, way: str) -> None:
    table = random_table(ROWS, 16, torch.float16)
    found = WAYS[way](table, ids)
    assert found.shape == (*ids.shape, 16)
    assert as_bytes(found) == expected_bytes(table, ids)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)], ids=str)
def test_lookup_of_no_ids_is_empty(shape: tuple[int, ...]) -> None:
    found = lookup(random_table(ROWS, 16, torch.bfloat16), torch.empty(shape, dtype=torch.int64))
    assert found.shape == (*shape, 16)


def test_lookup_in_a_table_without_rows_gives_zeros() -> None:
    table = torch.empty(0, 16, dtype=torch.bfloat16)
    ids = torch.tensor([0, 1, -1])
    assert not lookup(table, ids).count_nonzero()
    assert not run_kernel(table, ids).count_nonzero()


def test_lookup_in_a_table_without_columns_is_empty() -> None:
    assert lookup(torch.empty(4, 0), torch.tensor([0, 9])).shape == (2, 0)


def test_kernel_reads_a_table_that_is_not_aligned() -> None:
    storage = random_table(1, 2 + 2 * 8 * 5, torch.int8).reshape(-1)
    for offset in (0, 2):
        table = storage[offset : offset + 80].view(torch.bfloat16).reshape(5, 8)
        ids = torch.tensor([4, 0, 9])
        assert as_bytes(run_kernel(table, ids)) == expected_bytes(table, ids)


def test_lookup_fills_out() -> None:
    table = random_table(ROWS, 16, torch.bfloat16)
    ids = torch.tensor([[1, 2], [3, 99]])
    out = torch.empty(2, 2, 16, dtype=torch.bfloat16)
    assert lookup(table, ids, out=out) is out
    assert as_bytes(out) == expected_bytes(table, ids)


@settings(max_examples=60)
@given(
    rows=st.integers(0, 9),
    columns=st.integers(1, 40),
    ids=st.lists(st.integers(-3, 12), min_size=1, max_size=12),
    dtype=st.sampled_from(DTYPES),
)
def test_reference_equals_python(rows: int, columns: int, ids: list[int], dtype: torch.dtype) -> None:
    table = random_table(rows, columns, dtype, seed=rows)
    tensor = torch.tensor(ids, dtype=torch.int64)
    out = torch.full((len(ids), columns * table.element_size()), 7, dtype=torch.uint8).view(dtype)
    lookup_reference(table, tensor, out, LookupOptions())
    assert as_bytes(out) == expected_bytes(table, tensor)


@pytest.mark.parametrize(
    ("table", "ids", "words"),
    [
        pytest.param(torch.zeros(4), torch.tensor([0]), "table: found [4]", id="one_dimension"),
        pytest.param(torch.zeros(4, 4).T, torch.tensor([0]), None, id="transposed_square"),
        pytest.param(torch.zeros(4, 6)[:, :4], torch.tensor([0]), "contiguous", id="sliced"),
        pytest.param(torch.zeros(4, 4), torch.tensor([0.0]), "ids: found torch.float32", id="float_ids"),
        pytest.param(torch.zeros(4, 4), torch.tensor([True]), "ids: found torch.bool", id="bool_ids"),
        pytest.param(torch.zeros(4, 4), torch.tensor([0], dtype=torch.uint8), "torch.uint8", id="uint8_ids"),
        pytest.param(torch.zeros(4, 4), torch.empty(1, dtype=torch.int64, device="meta"), "meta", id="meta_ids"),
    ],
)
def test_lookup_refuses(table: torch.Tensor, ids: torch.Tensor, words: str | None) -> None:
    with pytest.raises(ftw.LookupArgumentError, match=None if words is None else words.replace("[", r"\[")) as caught:
        lookup(table, ids)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "out",
    [
        pytest.param(torch.empty(2, 5), id="shape"),
        pytest.param(torch.empty(2, 4, dtype=torch.float16), id="dtype"),
        pytest.param(torch.empty(4, 2).T, id="strides"),
        pytest.param(torch.empty(2, 4, device="meta"), id="device"),
    ],
)
def test_lookup_refuses_out(out: torch.Tensor) -> None:
    with pytest.raises(ftw.LookupArgumentError, match=r"lookup: out: .* is needed"):
        lookup(torch.zeros(4, 4), torch.tensor([0, 1]), out=out)


@pytest.mark.parametrize(
    ("nbytes", "unit"),
    [(4096, torch.int32), (66, torch.int16), (33, torch.uint8), (2000, torch.int32)],
    ids=["4096", "66", "33", "2000"],
)
def test_plan_takes_the_widest_unit(nbytes: int, unit: torch.dtype) -> None:
    table, out = torch.empty(4, nbytes, dtype=torch.uint8), torch.empty(1, nbytes, dtype=torch.uint8)
    plan = tile_row(nbytes, table.data_ptr() | out.data_ptr())
    assert plan.unit == unit
    assert plan.units * torch.empty(0, dtype=unit).element_size() == nbytes
    assert plan.block & (plan.block - 1) == 0


@pytest.mark.parametrize("out", [[1], 5], ids=str)
def test_out_that_is_no_tensor_is_refused(out: object) -> None:
    with pytest.raises(ftw.LookupArgumentError, match=r"out: found a (list|int), a tensor is needed"):
        lookup(torch.ones(3, 4), torch.tensor([1]), out=out)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make_ids", "found"),
    [
        (lambda: torch.tensor([1, 0, 2]).to_sparse(), r"a tensor with the layout torch\.sparse_coo"),
        (lambda: torch.eye(3, dtype=torch.int64).to_sparse_csr(), r"a tensor with the layout torch\.sparse_csr"),
        (lambda: torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])]), "a nested tensor"),
        (lambda: torch.nested.nested_tensor([torch.tensor([1])], layout=torch.jagged), "a nested tensor"),
    ],
    ids=["sparse", "csr", "nested", "jagged"],
)
@pytest.mark.filterwarnings("ignore")  # torch calls these layouts prototypes
def test_lookup_refuses_ids_that_are_not_dense(make_ids: Callable[[], torch.Tensor], found: str) -> None:
    ids = make_ids()
    for look_up in (lambda ids: lookup(torch.zeros(4, 2), ids), HostEmbedding(torch.zeros(4, 2))):
        with pytest.raises(ftw.LookupArgumentError, match=f"ids: found {found}, a dense one is needed"):
            look_up(ids)
