"""Distinct ids: rows are those of plain lookups, and each is fetched once."""

from functools import partial

import numpy as np
import pytest
import torch
from hot_tables import assert_same, expected_counts, expected_rows, make_hot, random_rows, values_of
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_launches import launch, plan
from packed_tables import random_table

import ftw
from ftw.kernels import distinct, packed_lookup
from ftw.kernels import lookup as dense_lookup
from ftw.kernels.arguments import check_distinct
from ftw.kernels.distinct import prefers_distinct
from ftw.kernels.hot import HotRowBuffers
from ftw.kernels.launching import launch_once
from ftw.kernels.lookup import lookup

ROWS = 13

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu_hot runs the compiled kernels")

IDS = {
    "same": torch.full((270,), 5),
    "distinct": torch.randperm(ROWS, generator=torch.Generator().manual_seed(0)),
    "one": torch.tensor([3]),
    "outside": torch.tensor([-1, ROWS, 2**40, -1, ROWS]),
    "mixed": torch.randint(-2, ROWS + 2, (300,), generator=torch.Generator().manual_seed(1)),
    "matrix": torch.randint(0, 3, (7, 9), generator=torch.Generator().manual_seed(2), dtype=torch.int32).T,
}


@pytest.fixture(autouse=True)
def poisoned_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the memory of owners, which is not initialised, with what a call before might have left there."""

    def make_poisoned(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.arange(table.shape[0], dtype=torch.int32) % 5 - 1

    for module in (dense_lookup, packed_lookup):
        monkeypatch.setattr(module, "make_owners", make_poisoned)


@pytest.mark.parametrize("is_hot", [False, True], ids=["cold", "hot"])
@pytest.mark.parametrize("columns", [1, 33, 5001])
@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_distinct_rows_equal_plain_ones(ids: torch.Tensor, columns: int, is_hot: bool) -> None:
    if columns > 33:
        ids = ids.reshape(-1)[:20]
    made = make_hot(random_rows(ROWS, columns, torch.bfloat16), [5, 0])
    out = torch.full((*ids.shape, 2 * columns), 0xA5, dtype=torch.uint8).view(torch.bfloat16)
    launch(made.table if is_hot else made.whole, ids, out, hot=made.hot if is_hot else None, is_distinct=True)
    assert_same(out, expected_rows(made.whole, ids))
    if is_hot:
        assert made.hot.counts is not None
        assert made.hot.counts.tolist() == expected_counts(ROWS, ids)


@pytest.mark.parametrize("is_hot", [False, True], ids=["cold", "hot"])
@pytest.mark.parametrize("is_scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("name", ["Q4_0", "Q6_K", "MXFP4"])
def test_distinct_packed_rows_equal_plain_ones(name: str, is_scaled: bool, is_hot: bool) -> None:
    ids, scale = IDS["mixed"][:30], 0.75 if is_scaled else None
    made = make_hot(random_table(name, ROWS, 512), [5, 0])
    out = torch.full((30, 1024), 0xA5, dtype=torch.uint8).view(torch.bfloat16)
    table, hot = (made.table, made.hot) if is_hot else (made.whole, None)
    with np.errstate(all="ignore"):
        launch(table, ids, out, name, scale=scale, hot=hot, is_distinct=True)
    wanted = expected_rows(values_of(made.whole, name, torch.bfloat16), ids, scale=scale)
    assert_same(out, wanted, is_exact=False)


@pytest.mark.parametrize("first_id", [1, 2**40, 2**63 - 1], ids=str)
def test_distinct_rows_of_a_shard(first_id: int) -> None:
    table = random_rows(ROWS, 16, torch.bfloat16)
    near = [first_id + offset for offset in (0, 5, 5, ROWS - 1, ROWS, -1, 0, 5)]
    ids = torch.tensor([token for token in near if token < 2**63] + [-(2**63), -1, 0])
    out = torch.empty(ids.numel(), 16, dtype=torch.bfloat16)
    launch(table, ids, out, first_id=first_id, is_distinct=True)
    assert_same(out, expected_rows(table, ids, first_id=first_id))


def test_each_row_is_fetched_by_its_owner_alone() -> None:
    """After the fetch, the places of all other positions are as they were; ids outside are everybody's."""
    made = make_hot(random_rows(ROWS, 16, torch.bfloat16), [5])
    ids = torch.tensor([3, 3, 5, -1, 4, 3, 5, 4, 99])
    out = torch.full((9, 32), 0xA5, dtype=torch.uint8).view(torch.bfloat16)
    elect, fetch, spread = plan(made.table, ids, out, hot=made.hot, is_distinct=True)
    owners = elect.arguments[1].fill_(-7)
    launch_once(elect)
    assert [row for row, owner in enumerate(owners.tolist()) if owner != -7] == [3, 4, 5]
    assert owners[3] in (0, 1, 5)
    assert owners[4] in (4, 7)
    assert owners[5] in (2, 6)
    launch_once(fetch)
    fetched = [position for position, row in enumerate(out.view(torch.uint8)) if not (row == 0xA5).all()]
    assert fetched == sorted([3, 8, *owners[3:6].tolist()])
    launch_once(spread)
    assert_same(out, expected_rows(made.whole, ids))


@pytest.mark.parametrize("ggml_type", [None, "Q4_0"], ids=["plain", "packed"])
@pytest.mark.parametrize("changes_before", ["elect", "fetch", "spread"])
@pytest.mark.parametrize("becomes", ["hot", "cold"])
def test_hot_rows_may_change_between_the_launches(becomes: str, changes_before: str, ggml_type: str | None) -> None:
    """Owners are left over from elsewhere, and name a place of zeros."""
    table = random_rows(ROWS, 32, torch.bfloat16) if ggml_type is None else random_table(ggml_type, ROWS, 32)
    all_slots = torch.arange(ROWS, dtype=torch.int32)
    no_slots = torch.full_like(all_slots, -1)
    before, after = (no_slots, all_slots) if becomes == "hot" else (all_slots, no_slots)
    hot = HotRowBuffers(before.clone(), table.clone(), torch.zeros_like(all_slots))
    ids = torch.tensor([-1, 5, 5, 0, 5, 12])
    out = torch.full((6, 64), 0xA5, dtype=torch.uint8).view(torch.bfloat16)
    launches = plan(table, ids, out, ggml_type, hot=hot, is_distinct=True)
    launches[0].arguments[1].zero_()
    for name, launched in zip(("elect", "fetch", "spread"), launches, strict=True):
        if name == changes_before:
            hot.slots.copy_(after)
        launch_once(launched)
    wanted = expected_rows(values_of(table, ggml_type, torch.bfloat16), ids)
    assert_same(out, wanted, is_exact=ggml_type is None)
    assert hot.counts is not None
    assert hot.counts.tolist() == expected_counts(ROWS, ids)


@settings(max_examples=40)
@given(rows=st.integers(1, 6), columns=st.integers(1, 9), ids=st.lists(st.integers(-1, 7), min_size=1, max_size=20))
def test_distinct_rows_in_any_shape(rows: int, columns: int, ids: list[int]) -> None:
    table, tensor = random_rows(rows, columns, torch.int8, seed=rows), torch.tensor(ids)
    out = torch.empty(len(ids), columns, dtype=torch.int8)
    launch(table, tensor, out, is_distinct=True)
    assert_same(out, expected_rows(table, tensor))


@pytest.mark.parametrize("shape", [(0,), (3, 0)], ids=str)
def test_distinct_lookup_of_no_ids_is_empty(shape: tuple[int, ...]) -> None:
    ids = torch.empty(shape, dtype=torch.int64)
    assert lookup(torch.zeros(4, 8), ids, is_distinct=True).shape == (*shape, 8)


def test_distinct_lookup_on_the_cpu_gives_the_same_rows() -> None:
    table = random_rows(ROWS, 16, torch.bfloat16)
    assert_same(lookup(table, IDS["mixed"], is_distinct=True), expected_rows(table, IDS["mixed"]))


def test_positions_fit_into_32_bits() -> None:
    check_distinct("lookup", torch.empty(2**31 - 1, dtype=torch.int64, device="meta"))
    with pytest.raises(ftw.LookupArgumentError, match="lookup: ids: found 2147483648 ids, at most 2147483647"):
        check_distinct("lookup", torch.empty(2**31, dtype=torch.int64, device="meta"))


def test_distinct_ids_are_preferred_from_a_number_on() -> None:
    of_a_table = partial(prefers_distinct, num_rows=ROWS, out_nbytes=0)
    assert not of_a_table(0)
    assert not of_a_table(distinct._MIN_IDS - 1)
    assert of_a_table(distinct._MIN_IDS)
    assert not of_a_table(distinct._MIN_IDS, has_hot=True)
    assert of_a_table(distinct._MIN_IDS_BESIDE_HOT, has_hot=True)


@pytest.mark.parametrize(
    ("num_rows", "out_nbytes", "is_preferred"),
    [
        pytest.param(1 << 20, 0, True, id="4_MiB_of_owners"),
        pytest.param((1 << 20) + 1, 4 << 20, False, id="owners_above_both"),
        pytest.param((1 << 20) + 1, (4 << 20) + 4, True, id="as_large_as_the_output"),
        pytest.param(160_000_000, 1024 * 512 * 2, False, id="n_grams"),
    ],
)
def test_owners_are_no_larger_than_the_output(num_rows: int, out_nbytes: int, is_preferred: bool) -> None:
    for has_hot in (False, True):
        assert prefers_distinct(1 << 16, num_rows=num_rows, out_nbytes=out_nbytes, has_hot=has_hot) is is_preferred
