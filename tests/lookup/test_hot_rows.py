"""Hot rows: which they are, how they change, and that no lookup ever gives another row for it."""

import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_launches import launch
from packed_tables import assert_equal_rows, expected, random_table

import ftw
from ftw.kernels.hot import HotRowBuffers
from ftw.lookup.embedding import HostEmbedding

ROWS, COLUMNS = 40, 6
TABLE = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)


def make(num_slots: int = 4, **options: object) -> HostEmbedding:
    return HostEmbedding(TABLE, name="wte.weight", hot_rows=num_slots, **options)


def look(embedding: HostEmbedding, *ids: int) -> None:
    embedding(torch.tensor(ids, dtype=torch.int64))


def check(embedding: HostEmbedding, table: torch.Tensor = TABLE) -> None:
    """Compare every row, and the hot rows' own account of themselves."""
    assert embedding.hot is not None
    slots, rows, counts = embedding.hot
    ids = embedding.hot_ids()
    numbers = ids - embedding.vocab_range[0]
    assert torch.equal((slots >= 0).nonzero()[:, 0], numbers)
    places = slots[numbers].long()
    assert places.unique().numel() == places.numel()
    assert torch.equal(rows[places].view(torch.uint8), table[numbers].view(torch.uint8))
    assert counts is not None
    before = counts.clone()
    start, length = embedding.vocab_range
    assert torch.equal(embedding(torch.arange(start - 2, start + length + 2))[2:-2], table)
    assert torch.equal(counts, before + 1)
    counts.copy_(before)


def test_nothing_is_hot_before_it_is_learnt() -> None:
    embedding = make()
    assert embedding.hot_ids().tolist() == []
    check(embedding)


def test_rows_looked_up_most_become_hot() -> None:
    embedding = make(2)
    look(embedding, 7, 7, 7, 1, 9, 9, -1, ROWS, 2**40)
    embedding.update_hot_rows()
    assert embedding.hot_ids().tolist() == [7, 9]
    check(embedding)


def test_rows_never_seen_stay_out() -> None:
    embedding = make(4)
    look(embedding, 5, 3)
    embedding.update_hot_rows()
    assert embedding.hot_ids().tolist() == [3, 5]
    check(embedding)


def test_counts_are_halved() -> None:
    embedding = make()
    look(embedding, *[8] * 5, *[2] * 2, 1)
    embedding.update_hot_rows()
    assert embedding.hot is not None
    assert embedding.hot.counts is not None
    assert embedding.hot.counts[[8, 2, 1]].tolist() == [2, 1, 0]


def test_rows_that_stay_keep_their_slots() -> None:
    embedding = make(3)
    look(embedding, *[10] * 8, *[11] * 8, *[12] * 8)
    embedding.update_hot_rows()
    assert embedding.hot is not None
    before = embedding.hot.slots.clone()
    look(embedding, *[20] * 9)
    look(embedding, *[10] * 4, *[12] * 4)
    embedding.update_hot_rows()
    assert embedding.hot_ids().tolist() == [10, 12, 20]
    assert torch.equal(embedding.hot.slots[[10, 12]], before[[10, 12]])
    assert embedding.hot.slots[20] == before[11]
    assert embedding.hot.slots[11] == -1
    check(embedding)


def test_of_equal_counts_those_that_are_hot_stay() -> None:
    embedding = make(2)
    embedding.set_hot_rows([30, 31])
    look(embedding, *range(ROWS))
    embedding.update_hot_rows()
    assert embedding.hot_ids().tolist() == [30, 31]


def test_hot_row_leaves_only_for_another() -> None:
    embedding = make(3)
    embedding.set_hot_rows([1, 2, 3])
    look(embedding, 9)
    embedding.update_hot_rows()
    assert 9 in embedding.hot_ids()
    assert len(embedding.hot_ids()) == 3
    for _ in range(3):
        embedding.update_hot_rows()
    assert len(embedding.hot_ids()) == 3
    check(embedding)


def test_shifted_stream_is_followed() -> None:
    embedding = make(4)
    for first in (0, 20, 33):
        for _ in range(6):
            look(embedding, *[row for row in range(first, first + 4) for _ in range(10)])
            embedding.update_hot_rows()
        assert embedding.hot_ids().tolist() == list(range(first, first + 4))
        check(embedding)


def test_no_address_ever_changes() -> None:
    embedding = make(4)
    assert embedding.hot is not None
    before = [tensor.data_ptr() for tensor in embedding.hot]
    embedding.set_hot_rows([3, 4])
    look(embedding, 1, 2, 1)
    embedding.update_hot_rows()
    assert [tensor.data_ptr() for tensor in embedding.hot] == before


def test_count_that_is_huge_or_has_overflowed_does_no_harm() -> None:
    embedding = make(2)
    assert embedding.hot is not None
    assert embedding.hot.counts is not None
    embedding.hot.counts[:4] = torch.tensor([2**31 - 1, 2**30 - 2, 5, 1], dtype=torch.int32)
    look(embedding, 0)
    assert embedding.hot.counts[0] == -(2**31)
    embedding.update_hot_rows()
    assert embedding.hot_ids().tolist() == [0, 1]
    assert embedding.hot.counts[:4].tolist() == [2**30, 2**29 - 1, 2, 0]  # as of unsigned numbers
    check(embedding)


def test_modes_of_their_making_do_not_matter() -> None:
    with torch.inference_mode(), torch.device("meta"):
        embedding = make(2)
    ids = torch.tensor([3, 3, 4])
    embedding(ids)
    embedding.update_hot_rows()
    assert embedding.hot_ids().tolist() == [3, 4]
    with torch.inference_mode(), torch.device("meta"):
        embedding(ids)
        embedding.set_hot_rows([5, 6])
        assert embedding.hot_ids().tolist() == [5, 6]
        embedding.update_hot_rows()
    embedding.set_hot_rows([7])
    check(embedding)


def test_threads_that_look_up_while_they_change_get_their_rows() -> None:
    """On a CPU nothing orders them, so copies are not read there, only counted."""
    table = torch.arange(128.0)[:, None].expand(128, 512).contiguous()
    embedding = HostEmbedding(table, hot_rows=64)
    wrong, is_done = [], threading.Event()

    def look_up() -> None:
        generator = torch.Generator().manual_seed(0)
        while not is_done.is_set():
            ids = torch.randint(0, 128, (256,), generator=generator)
            if not torch.equal(embedding(ids), table[ids]):
                wrong.append(ids)

    threads = [threading.Thread(target=look_up) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        embedding.set_hot_rows(torch.randperm(128)[:64])
    is_done.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_lookups_on_a_cpu_read_the_table_itself() -> None:
    embedding = make(2)
    embedding.set_hot_rows([1, 2])
    assert embedding.hot is not None
    embedding.hot.rows.fill_(7)
    ids = torch.tensor([1, 2, 3])
    assert torch.equal(embedding(ids), TABLE[ids])


def test_caller_sets_the_rows() -> None:
    embedding = make(4)
    for ids in ([5, 39, 0], torch.tensor([1, 5], dtype=torch.int32), [], (2, 3, 1, 0), np.array([7, 6]), range(3)):
        embedding.set_hot_rows(ids)
        assert embedding.hot_ids().tolist() == sorted(int(number) for number in ids)
        check(embedding)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        pytest.param([1, 1], "found an id twice", id="twice"),
        pytest.param([1, ROWS], f"found id {ROWS}, allowed are 0 to {ROWS - 1}", id="beyond"),
        pytest.param([-1], "found id -1", id="negative"),
        pytest.param([1, 2, 3, 4, 5], "found 5 ids, there is room for 4", id="too-many"),
        pytest.param([0.5], "a list of ids is needed", id="floats"),
        pytest.param(torch.zeros(1, 1, dtype=torch.int64), "a list of ids is needed", id="matrix"),
        pytest.param(torch.tensor(3), "a list of ids is needed", id="0-d"),
        pytest.param({1, 2}, "a list of ids is needed", id="set"),
        pytest.param((number for number in (1, 2)), "a list of ids is needed", id="generator"),
        pytest.param(None, "a list of ids is needed", id="none"),
        pytest.param("ab", "a list of ids is needed", id="text"),
        pytest.param([2**63], "a list of ids is needed", id="beyond-int64"),
        pytest.param(torch.zeros(1, dtype=torch.int64, device="meta"), "a list of ids is needed", id="meta"),
    ],
)
def test_rows_that_cannot_be_hot_are_refused(ids: object, words: str) -> None:
    embedding = make(4)
    embedding.set_hot_rows([7])
    with pytest.raises(ftw.LookupArgumentError, match=r"wte.weight: hot rows: ") as caught:
        embedding.set_hot_rows(ids)
    assert words in str(caught.value)
    assert embedding.hot_ids().tolist() == [7]


def test_shard_counts_and_keeps_its_own_ids() -> None:
    embedding = HostEmbedding(TABLE, vocab_range=(100, 30), hot_rows=2)
    look(embedding, 100, 129, 129, 130, 99, 0, 5)
    embedding.update_hot_rows()
    assert embedding.hot_ids().tolist() == [100, 129]
    check(embedding, TABLE[:30])
    with pytest.raises(ftw.LookupArgumentError, match="found id 99, allowed are 100 to 129"):
        embedding.set_hot_rows([99])


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets nothing then; test_gpu_embedding has it")
@pytest.mark.parametrize("columns", [6, 33, 5001], ids=str)
def test_kernel_fills_slots_in_place(columns: int) -> None:
    """On a device one launch reads rows that stay from the very slots that it writes."""
    table = torch.randn(9, columns).to(torch.bfloat16)
    stays, comes = 4, 7
    rows = torch.randn(3, columns).to(torch.bfloat16)
    rows[1] = table[stays] + 1  # so that it shows where the row was taken from
    wanted = torch.stack([table[comes], rows[1], torch.zeros(columns, dtype=torch.bfloat16)])
    slots = torch.full((9,), -1, dtype=torch.int32)
    slots[stays] = 1
    launch(table, torch.tensor([comes, stays, -1]), rows, hot=HotRowBuffers(slots, rows))
    assert torch.equal(rows, wanted)


@pytest.mark.parametrize("name", ["Q4_0", "Q6_K"])
def test_packed_rows_stay_packed(name: str) -> None:
    table = random_table(name, ROWS, 512)
    embedding = HostEmbedding(table, ggml_type=name, hot_bytes=5 * table.shape[1])
    ids = torch.tensor([0, 3, 3, 9, 39, 40, -1])
    for _ in range(3):
        assert_equal_rows(embedding(ids), expected(table, ids, name, torch.bfloat16))
        embedding.update_hot_rows()
    assert embedding.hot is not None
    assert embedding.hot.rows.shape == (5, table.shape[1])
    assert embedding.hot_ids().tolist() == [0, 3, 9, 39]


@pytest.mark.parametrize(
    ("options", "num_slots"),
    [
        ({"hot_rows": 3}, 3),
        ({"hot_rows": ROWS + 1}, ROWS),
        ({"hot_bytes": 5 * COLUMNS * 2 + 1}, 5),
        ({"hot_bytes": "64MiB"}, ROWS),
        ({"hot_rows": 2, "device": "cpu"}, 2),
        ({"hot_rows": np.int32(2)}, 2),
    ],
    ids=["rows", "more-than-there-are", "bytes", "text", "device", "numpy"],
)
def test_room_is_given_as_rows_or_bytes(options: dict[str, object], num_slots: int) -> None:
    embedding = HostEmbedding(TABLE, **options)
    assert embedding.hot is not None
    slots, rows, counts = embedding.hot
    assert counts is not None
    assert (slots.shape, rows.shape, counts.shape) == ((ROWS,), (num_slots, COLUMNS), (ROWS,))
    assert (slots.dtype, rows.dtype, counts.dtype) == (torch.int32, TABLE.dtype, torch.int32)


@pytest.mark.parametrize(
    "options",
    [{}, {"hot_rows": 0}, {"hot_bytes": 0}, {"hot_bytes": "0"}],
    ids=str,
)
def test_no_room_means_no_hot_rows(options: dict[str, object]) -> None:
    embedding = HostEmbedding(TABLE, **options)
    assert embedding.hot is None
    for change in (embedding.update_hot_rows, embedding.hot_ids, lambda: embedding.set_hot_rows([1])):
        with pytest.raises(ftw.LookupArgumentError, match="hot rows: there are none"):
            change()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hot_rows": 1, "hot_bytes": 1}, "found together with hot_bytes"),
        ({"hot_rows": -1}, "hot_rows: found -1"),
        ({"hot_rows": 1.5}, "hot_rows: found 1.5"),
        ({"hot_rows": True}, "hot_rows: found True"),
        ({"hot_rows": ""}, "hot_rows: found ''"),
        ({"hot_rows": 0.0}, "hot_rows: found 0.0"),
        ({"hot_bytes": ""}, "hot_bytes: '' is not a size"),
        ({"hot_bytes": 0.0}, "hot_bytes: 0.0 is neither bytes, 0 or more, nor a size"),
        ({"hot_bytes": "much"}, "hot_bytes: 'much' is not a size"),
        ({"hot_bytes": -8}, "hot_bytes: -8 is neither bytes, 0 or more, nor a size"),
    ],
    ids=[
        "both",
        "negative",
        "fraction",
        "bool",
        "no-rows",
        "no-number",
        "no-bytes",
        "no-bytes-number",
        "no-size",
        "negative-bytes",
    ],
)
def test_room_that_is_none_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ftw.LookupArgumentError) as caught:
        HostEmbedding(TABLE, **options)
    assert words in str(caught.value)


def test_unknown_device_is_refused() -> None:
    with pytest.raises(ftw.DeviceError):
        make(2, device="cuda:99")


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((4, 6), {"hot_bytes": 6 * 4 - 1}),
        ((0, 4), {"hot_rows": 3}),
        ((4, 0), {"hot_bytes": "1MiB"}),
        ((4, 4), {"hot_rows": 3, "vocab_range": (9, 0)}),
    ],
    ids=["less-than-a-row", "no-rows", "no-columns", "no-ids"],
)
def test_room_that_was_asked_for_and_holds_none_stays_empty(shape: tuple[int, int], options: dict[str, object]) -> None:
    """Ranks that all update have not all got rows."""
    embedding = HostEmbedding(torch.zeros(shape), **options)
    assert embedding.hot is None
    embedding.set_hot_rows([])
    embedding.update_hot_rows()
    assert embedding.hot_ids().tolist() == []
    with pytest.raises(ftw.LookupArgumentError, match="found 1 ids, there is room for 0"):
        embedding.set_hot_rows([0])


def test_close_gives_them_back() -> None:
    embedding = make()
    embedding.close()
    assert embedding.hot is None
    for change in (embedding.update_hot_rows, embedding.hot_ids, lambda: embedding.set_hot_rows([1])):
        with pytest.raises(ftw.ClosedError):
            change()


@settings(max_examples=60)
@given(
    num_slots=st.integers(1, ROWS),
    steps=st.lists(
        st.one_of(
            st.none(),  # update
            st.lists(st.integers(-2, ROWS + 1), max_size=60),  # look up
            st.sets(st.integers(0, ROWS - 1)),  # set
        ),
        max_size=12,
    ),
)
def test_hot_rows_are_those_counted_most(num_slots: int, steps: list[object]) -> None:
    embedding = make(num_slots)
    counts, hot = [0] * ROWS, set()
    for step in steps:
        if step is None:
            embedding.update_hot_rows()
            found = set(embedding.hot_ids().tolist())
            least = min((counts[row] for row in found), default=math.inf)
            assert all(counts[row] <= least or row in found for row in range(ROWS)) or len(found) < num_slots
            assert all(row in found for row in range(ROWS) if counts[row]) or len(found) == num_slots
            assert all(counts[row] or row in hot for row in found)
            counts, hot = [count >> 1 for count in counts], found
        elif isinstance(step, set):
            hot = set(list(step)[:num_slots])
            embedding.set_hot_rows(sorted(hot))
        else:
            look(embedding, *step)
            for row in step:
                if 0 <= row < ROWS:
                    counts[row] += 1
        assert set(embedding.hot_ids().tolist()) == hot
        check(embedding)
