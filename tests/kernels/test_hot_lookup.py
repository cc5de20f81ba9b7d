"""Lookups with hot rows, counts, parts of rows and scales: kernels by Triton's interpreter, and references."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hot_tables import HotTable, assert_same, expected_counts, expected_rows, make_hot, random_rows, values_of
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_launches import launch
from packed_tables import dtype_name, random_table, special_table

import ftw
from ftw.ggml_types import ggml_types_by_name
from ftw.kernels import packed_lookup as module
from ftw.kernels.hot import HotRowBuffers
from ftw.kernels.lookup import lookup
from ftw.kernels.packed_lookup import packed_columns, packed_lookup

ROWS = 11
HOT_ROWS = [7, 0, 3]
IDS = torch.tensor([0, 1, 7, 7, -1, 3, ROWS, 10, 1, 2**40, -(2**63)])
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
SCALES = [45.254834, -0.3, 1.0, 1e-4, 6e4]
PACKED = ["Q4_0", "Q6_K", "MXFP4"]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu_hot runs the compiled kernel")


def look_up_by_kernel(
    table: torch.Tensor, ids: torch.Tensor, *, ggml_type: str | None, dtype: torch.dtype, **options: Any
) -> torch.Tensor:
    """Run Triton's interpreter into memory that is poisoned before and looked at behind; the scale is rounded here."""
    start_length = options.get("columns")
    width = table.shape[1] if ggml_type is None else packed_columns(table, ggml_type)
    width = width if start_length is None else start_length[1]
    scale = options.pop("scale", None)
    scale = None if scale is None else torch.tensor(scale, dtype=dtype).item()
    nbytes = ids.numel() * width * torch.empty(0, dtype=dtype).element_size()
    storage = torch.full((nbytes + 128,), 0xA5, dtype=torch.uint8)
    out = storage[64 : 64 + nbytes].view(dtype).view(*ids.shape, width)
    with np.errstate(all="ignore"):
        launch(table, ids, out, ggml_type, scale=scale, **options)
    assert (storage[:64] == 0xA5).all()
    assert (storage[64 + nbytes :] == 0xA5).all()
    return out


def look_up(
    table: torch.Tensor, ids: torch.Tensor, *, ggml_type: str | None, dtype: torch.dtype, **options: Any
) -> torch.Tensor:
    if ggml_type is None:
        return lookup(table, ids, **options)
    return packed_lookup(table, ids, ggml_type, dtype=dtype, **options)


WAYS: dict[str, Callable[..., torch.Tensor]] = {"kernel": look_up_by_kernel, "reference": look_up}


def check(
    way: str,
    made: HotTable,
    ids: torch.Tensor,
    ggml_type: str | None = None,
    dtype: torch.dtype | None = None,
    *,
    is_hot: bool = True,
    is_distinct: bool = False,
    **options: Any,
) -> None:
    """Look up, compare rows and counts, and see that slots and copies are left alone."""
    dtype = made.whole.dtype if dtype is None else dtype
    before = [tensor.clone() for tensor in (made.table, made.hot.slots, made.hot.rows.view(torch.uint8))]
    found = WAYS[way](
        made.table if is_hot else made.whole,
        ids,
        ggml_type=ggml_type,
        dtype=dtype,
        hot=made.hot if is_hot else None,
        is_distinct=is_distinct,
        **options,
    )
    wanted = expected_rows(values_of(made.whole, ggml_type, dtype), ids, **options)
    assert_same(found, wanted, is_exact=ggml_type is None and options.get("scale") is None)
    if is_hot and made.hot.counts is not None:
        assert made.hot.counts.tolist() == expected_counts(made.whole.shape[0], ids, options.get("first_id", 0))
    for tensor, kept in zip((made.table, made.hot.slots, made.hot.rows), before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), kept.view(torch.uint8))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_counted", [False, True], ids=["uncounted", "counted"])
@pytest.mark.parametrize("columns", [1, 3, 16, 33, 2560, 5001])
def test_hot_rows_come_from_their_copies(columns: int, is_counted: bool, way: str) -> None:
    for dtype in (torch.bfloat16, torch.int8):
        check(way, make_hot(random_rows(ROWS, columns, dtype), HOT_ROWS, is_counted=is_counted), IDS)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hot_rows", [[], list(range(ROWS)), [ROWS - 1]], ids=["none", "all", "last"])
def test_any_rows_may_be_hot(hot_rows: list[int], way: str) -> None:
    check(way, make_hot(random_rows(ROWS, 16, torch.float32), hot_rows), IDS.reshape(1, -1))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first_id", [1, 2**31, 2**63 - 1], ids=str)
def test_slots_are_those_of_rows_not_ids(first_id: int, way: str) -> None:
    near = [first_id + offset for offset in (-1, 0, 3, 7, 7, ROWS - 1, ROWS)]
    ids = torch.tensor([token for token in near if token < 2**63] + [0, -1, -(2**63)])
    check(way, make_hot(random_rows(ROWS, 16, torch.bfloat16), HOT_ROWS), ids, first_id=first_id)


@pytest.mark.parametrize("way", WAYS)
def test_counts_add_up_over_lookups(way: str) -> None:
    made = make_hot(random_rows(ROWS, 5001, torch.bfloat16), HOT_ROWS)
    assert made.hot.counts is not None
    ids = torch.tensor([1, 1, 7, 99])
    for _ in range(3):
        WAYS[way](made.table, ids, ggml_type=None, dtype=torch.bfloat16, hot=made.hot)
    assert made.hot.counts.tolist() == [0, 6, 0, 0, 0, 0, 0, 3, 0, 0, 0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*PACKED, "IQ2_XS"])
def test_hot_rows_stay_packed(name: str, way: str) -> None:
    for columns in (256, 2560):
        check(way, make_hot(random_table(name, ROWS, columns), HOT_ROWS), IDS, name, torch.bfloat16)


@pytest.mark.parametrize("name", [*PACKED, "IQ2_XS"])
def test_hot_rows_of_a_table_that_is_not_staged(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a table on a GPU."""
    plan = module._plan
    monkeypatch.setattr(module, "_plan", lambda *arguments: plan(*arguments)._replace(is_staged=False))
    made = make_hot(random_table(name, ROWS, 512), HOT_ROWS)
    check("kernel", made, IDS, name, torch.float32, scale=0.3, is_distinct=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("columns", [(0, 32), (32, 64), (96, 0), (0, 96), (1, 3), (95, 1), (94, 2)], ids=str)
def test_columns_are_a_part_of_each_row(columns: tuple[int, int], way: str) -> None:
    for dtype in (torch.bfloat16, torch.uint8):
        made = make_hot(random_rows(ROWS, 96, dtype), HOT_ROWS)
        if not columns[1]:
            assert lookup(made.table, IDS, columns=columns, hot=made.hot).shape == (IDS.numel(), 0)
            continue
        check(way, made, IDS, is_hot=False, columns=columns)
        check(way, made, IDS, columns=columns)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PACKED)
def test_columns_of_packed_rows_are_whole_blocks(name: str, way: str) -> None:
    block_size = ggml_types_by_name()[name].block_size
    made = make_hot(random_table(name, ROWS, 9 * block_size), HOT_ROWS)
    for start, count in ((0, 1), (1, 4), (8, 1), (3, 5)):
        columns = (start * block_size, count * block_size)
        check(way, made, IDS, name, torch.float16, is_hot=False, columns=columns)
        made.hot.counts.zero_()
        check(way, made, IDS, name, torch.float16, columns=columns)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_name)
def test_scale_is_what_torch_multiplies_by(dtype: torch.dtype, scale: float, way: str) -> None:
    """All 65536 values of two bytes, or random ones of four."""
    if dtype == torch.float32:
        table = random_rows(64, 1024, dtype)
    else:
        table = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(64, 1024).view(dtype)
    ids = torch.arange(-1, 65)
    assert_same(
        WAYS[way](table, ids, ggml_type=None, dtype=dtype, scale=scale),
        expected_rows(table, ids, scale=scale),
        is_exact=False,
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_name)
@pytest.mark.parametrize("name", PACKED)
def test_decoded_values_are_rounded_before_they_are_scaled(name: str, dtype: torch.dtype, way: str) -> None:
    table = special_table(name, 2048)
    check(way, make_hot(table, [0]), torch.arange(-1, table.shape[0]), name, dtype, scale=-0.37)


@pytest.mark.parametrize("ggml_type", [None, "Q4_0"], ids=["plain", "packed"])
def test_default_device_is_not_asked(ggml_type: str | None) -> None:
    """Models are built under `torch.device("meta")`, and served under `torch.device("cuda")`."""
    scale = 0.3515625 + torch.rand(1).item() / 1024  # rounded for the first time
    made = make_hot(random_rows(ROWS, 32, torch.float16), HOT_ROWS)
    if ggml_type is not None:
        made = make_hot(random_table(ggml_type, ROWS, 32), HOT_ROWS)
    with torch.device("meta"):
        found = look_up(made.table, IDS, ggml_type=ggml_type, dtype=torch.float16, hot=made.hot, scale=scale)
    wanted = expected_rows(values_of(made.whole, ggml_type, torch.float16), IDS, scale=scale)
    assert_same(found, wanted, is_exact=False)


@pytest.mark.parametrize("way", WAYS)
def test_rows_outside_are_positive_zeros_for_any_scale(way: str) -> None:
    ids = torch.tensor([-1, ROWS, 2**62])
    for scale in (-1.5, 6e4):
        found = WAYS[way](random_rows(ROWS, 8, torch.float16), ids, ggml_type=None, dtype=torch.float16, scale=scale)
        assert not found.view(torch.int16).count_nonzero()
        found = WAYS[way](random_rows(1, 1, torch.float16), ids, ggml_type=None, dtype=torch.float16, scale=scale)
        assert not found.view(torch.int16).count_nonzero()
        found = WAYS[way](random_table("Q4_0", ROWS, 32), ids, ggml_type="Q4_0", dtype=torch.float16, scale=scale)
        assert not found.view(torch.int16).count_nonzero()


@settings(max_examples=80)
@given(data=st.data(), way=st.sampled_from(sorted(WAYS)))
def test_everything_at_once(data: st.DataObject, way: str) -> None:
    ggml_type = data.draw(st.sampled_from([None, None, *PACKED]))
    rows, dtype = data.draw(st.integers(1, 9)), data.draw(st.sampled_from(FLOATS))
    block_size = 1 if ggml_type is None else ggml_types_by_name()[ggml_type].block_size
    blocks = data.draw(st.integers(1, 40 if ggml_type is None else 3))
    start = data.draw(st.integers(0, blocks - 1))
    length = data.draw(st.integers(1, blocks - start))
    first_id = data.draw(st.integers(0, 3))
    if ggml_type is None:
        table = random_rows(rows, blocks, dtype, seed=blocks)
    else:
        table = random_table(ggml_type, rows, blocks * block_size, seed=blocks)
    options: dict[str, Any] = {"first_id": first_id}
    if data.draw(st.booleans()):
        options["columns"] = (start * block_size, length * block_size)
    if data.draw(st.booleans()):
        options["scale"] = data.draw(st.sampled_from(SCALES))
    made = make_hot(
        table,
        data.draw(st.lists(st.integers(0, rows - 1), unique=True)),
        is_counted=data.draw(st.booleans()),
    )
    ids = data.draw(st.lists(st.integers(-2, rows + 4), min_size=1, max_size=12))
    tensor = torch.tensor(ids, dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))
    is_hot, is_distinct = data.draw(st.booleans()), data.draw(st.booleans())
    check(way, made, tensor, ggml_type, dtype, is_hot=is_hot, is_distinct=is_distinct, **options)


GOOD = HotRowBuffers(torch.zeros(4, dtype=torch.int32), torch.zeros(2, 32))


@pytest.mark.parametrize(
    ("hot", "words"),
    [
        pytest.param(GOOD._replace(slots=GOOD.slots[:3]), "slots: found", id="too_few_slots"),
        pytest.param(GOOD._replace(slots=GOOD.slots.long()), "slots: found torch.int64", id="wide_slots"),
        pytest.param(GOOD._replace(slots=GOOD.slots.to("meta")), "slots: found .* on meta", id="slots_elsewhere"),
        pytest.param(GOOD._replace(rows=torch.zeros(2, 31)), "rows: found", id="narrow_rows"),
        pytest.param(GOOD._replace(rows=torch.zeros(64)), "rows: found", id="flat_rows"),
        pytest.param(GOOD._replace(rows=GOOD.rows.half()), "rows: found torch.float16", id="half_rows"),
        pytest.param(GOOD._replace(rows=torch.zeros(32, 2).T), "rows: found", id="transposed_rows"),
        pytest.param(GOOD._replace(rows=torch.zeros(65)[1:].view(2, 32)), "rows: found at address", id="odd_rows"),
        pytest.param(GOOD._replace(counts=torch.zeros(4)), "counts: found torch.float32", id="float_counts"),
    ],
)
def test_lookup_refuses_hot_rows(hot: HotRowBuffers, words: str) -> None:
    with pytest.raises(ftw.LookupArgumentError, match=f"lookup: hot: {words}.* is needed"):
        lookup(torch.zeros(4, 32), torch.tensor([0]), hot=hot)
    lookup(torch.zeros(4, 32), torch.tensor([0]), hot=GOOD)


@pytest.mark.parametrize("columns", [(-1, 3), (0, 5), (4, 1), (2, -1)], ids=str)
def test_lookup_refuses_columns(columns: tuple[int, int]) -> None:
    with pytest.raises(ftw.LookupArgumentError, match=r"lookup: columns: found .* within the row's 4 is needed"):
        lookup(torch.zeros(4, 4), torch.tensor([0]), columns=columns)


@pytest.mark.parametrize("columns", [(16, 32), (0, 48), (0, 96), (-32, 32)], ids=str)
def test_packed_lookup_refuses_columns(columns: tuple[int, int]) -> None:
    words = "packed_lookup: columns: found .* within the row's 64, in whole blocks of 32, is needed"
    with pytest.raises(ftw.LookupArgumentError, match=words):
        packed_lookup(torch.zeros(4, 68, dtype=torch.uint8), torch.tensor([0]), "Q8_0", columns=columns)


@pytest.mark.parametrize("scale", [0.0, -0.0, float("nan"), float("inf"), 1e-9, 1e6], ids=str)
def test_lookup_refuses_a_scale(scale: float) -> None:
    """Also one that is zero or infinite once it is rounded."""
    with pytest.raises(ftw.LookupArgumentError, match=r"lookup: scale: found .*, a number that is finite and not zero"):
        lookup(torch.zeros(4, 4, dtype=torch.float16), torch.tensor([0]), scale=scale)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e4m3fn], ids=dtype_name)
def test_lookup_scales_no_other_dtype(dtype: torch.dtype) -> None:
    with pytest.raises(ftw.LookupArgumentError, match=f"scale: found rows of {dtype}"):
        lookup(random_rows(4, 4, dtype), torch.tensor([0]), scale=2.0)


def test_kernel_scales_no_values_at_odd_addresses() -> None:
    storage = torch.zeros(4 * 8 + 2, dtype=torch.uint8)
    table = torch.frombuffer(memoryview(storage.numpy())[1:33], dtype=torch.bfloat16).view(4, 4)
    out = torch.empty(1, 4, dtype=torch.bfloat16)
    with pytest.raises(ftw.LookupArgumentError, match="no multiple of 2"):
        launch(table, torch.tensor([0]), out, scale=2.0)
