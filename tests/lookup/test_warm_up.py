"""Warm-up: what it tries covers all that Triton compiles apart for the lookups that follow."""

from collections.abc import Iterator

import pytest
import torch

import ftw
from ftw.ggml_types import ggml_types_by_name
from ftw.kernels.distinct import prefers_distinct
from ftw.kernels.launching import launch_key
from ftw.kernels.lookup import LOOKUP
from ftw.kernels.operation import LookupOptions, Operation
from ftw.kernels.packed_lookup import PACKED_LOOKUP
from ftw.lookup.embedding import HostEmbedding
from ftw.lookup.warm_up import INDEX_DTYPES, plan_trials

MOST = 2100
PLAIN = torch.zeros(300, 96, dtype=torch.bfloat16)
PACKED = torch.zeros(300, 4 * ggml_types_by_name()["Q4_0"].type_size, dtype=torch.uint8)


def launch_keys(operation: Operation, table: torch.Tensor, ids: torch.Tensor, width: int) -> Iterator[object]:
    """Yield what tells the kernels of one lookup from all others."""
    options = LookupOptions(ggml_type="" if operation is LOOKUP else "Q4_0")
    out = torch.empty(ids.numel(), width, dtype=torch.bfloat16)
    is_distinct = prefers_distinct(ids.numel(), num_rows=table.shape[0], out_nbytes=out.nbytes)
    for launch in operation.plan(table, ids, out, options._replace(is_distinct=is_distinct)):
        yield launch_key(launch, 0)


@pytest.mark.parametrize(
    ("operation", "table", "width"), [(LOOKUP, PLAIN, 96), (PACKED_LOOKUP, PACKED, 128)], ids=["plain", "packed"]
)
@pytest.mark.parametrize("most", [1, 15, 16, 100, 1024, 1030, MOST])
def test_trials_cover_every_kernel_of_later_lookups(
    operation: Operation, table: torch.Tensor, width: int, most: int
) -> None:
    def keys(ids: torch.Tensor) -> set[object]:
        return set(launch_keys(operation, table, ids, width))

    cpu = torch.device("cpu")
    tried = set().union(*(keys(trial.make(cpu)) for trial in plan_trials("t", most, INDEX_DTYPES)))
    ladder = [*range(1, min(most, 70) + 1), *range(1020, most + 1)]
    needed: set[object] = set()
    for dtype in INDEX_DTYPES:
        ids = torch.zeros(most + 1, dtype=dtype)
        for count in ladder:
            needed |= keys(ids[:count]) | keys(ids[1 : count + 1])
    assert needed == tried & needed
    assert needed


def test_trials_are_of_ids_that_no_table_has() -> None:
    trials = plan_trials("t", 40, INDEX_DTYPES)
    assert {trial.dtype for trial in trials} == set(INDEX_DTYPES)
    assert max(trial.num_ids for trial in trials) == 40
    assert all((trial.make(torch.device("cpu")) == -1).all() for trial in trials)


def test_warm_up_on_a_cpu_changes_nothing() -> None:
    embedding = HostEmbedding(PLAIN, hot_rows=4, device="cpu")
    embedding.warm_up(MOST)
    assert embedding.hot is not None
    assert not embedding.hot.counts.any()
    assert embedding.hot_ids().tolist() == []


@pytest.mark.parametrize("most", [0, -1, "8", True, 2.5], ids=str)
def test_number_of_ids_that_is_none_is_refused(most: object) -> None:
    with pytest.raises(ftw.LookupArgumentError, match="t: max_ids: found"):
        HostEmbedding(PLAIN, name="t").warm_up(most)  # type: ignore[arg-type]


def test_dtype_that_is_no_index_is_refused() -> None:
    with pytest.raises(ftw.LookupArgumentError, match=r"t: dtypes: found torch\.int16"):
        HostEmbedding(PLAIN, name="t").warm_up(8, dtypes=(torch.int16,))


def test_closed_table_is_not_warmed_up() -> None:
    embedding = HostEmbedding(PLAIN)
    embedding.close()
    with pytest.raises(ftw.ClosedError):
        embedding.warm_up(8)
