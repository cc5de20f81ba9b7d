"""EagerLookup: which way a lookup goes, by the shapes alone."""

import pytest
import torch

from ftw.lookup.eager_lookup import EagerLookup
from ftw.lookup.row_format import RowFormat
from ftw.lookup.table_storage import TableStorage


@pytest.mark.parametrize(("rows", "is_distinct"), [(1 << 10, True), (3 << 20, False)], ids=["few_rows", "many_rows"])
def test_eager_lookups_elect_where_owners_are_affordable(rows: int, is_distinct: bool) -> None:
    table = torch.zeros(rows, 2, dtype=torch.int8)
    row_format = RowFormat(0, rows, 2, torch.int8, torch.int8, None, None, None)
    assert EagerLookup(TableStorage("table", table, row_format), row_format)._is_distinct(2048) is is_distinct
