"""HostEmbedding on the CPU: rows, dtypes, shards, scales, slices, copies, and its close."""

import copy
import io
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from packed_tables import assert_equal_rows, expected, random_table
from torch import nn

import ftw
from ftw.lookup.embedding import HostEmbedding
from ftw.pinned import PinnedBuffer


@pytest.fixture
def table() -> torch.Tensor:
    return torch.randn(50, 12, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def test_embedding_equals_torchs(table: torch.Tensor) -> None:
    ids = torch.randint(0, 50, (3, 7))
    assert torch.equal(HostEmbedding(table)(ids), F.embedding(ids, table))


def test_embedding_keeps_the_tables_dtype_unless_told(table: torch.Tensor) -> None:
    ids = torch.tensor([3, 50])
    assert HostEmbedding(table)(ids).dtype == torch.bfloat16
    found = HostEmbedding(table, dtype=torch.float32)(ids)
    assert found.dtype == torch.float32
    assert torch.equal(found[0], table[3].float())
    assert not found[1].count_nonzero()


def test_embedding_rounds_as_torch_does() -> None:
    table = torch.randn(50, 12, generator=torch.Generator().manual_seed(2))
    found = HostEmbedding(table, dtype=torch.bfloat16)(torch.arange(50))
    assert torch.equal(found, table.to(torch.bfloat16))


def test_embedding_tells_its_shape(table: torch.Tensor) -> None:
    embedding = HostEmbedding(table, name="wte.weight")
    assert (embedding.num_embeddings, embedding.embedding_dim, embedding.dtype) == (50, 12, torch.bfloat16)
    assert embedding.placement == "host"
    assert repr(embedding) == "HostEmbedding(50, 12, dtype=torch.bfloat16, placement='host')"


def test_embedding_holds_no_parameter(table: torch.Tensor) -> None:
    model = nn.Sequential(HostEmbedding(table), nn.Linear(12, 3, dtype=torch.bfloat16))
    assert [name for name, _ in model.named_parameters()] == ["1.weight", "1.bias"]
    assert set(model.state_dict()) == {"1.weight", "1.bias"}
    model.half()
    embedding = model[0]
    assert isinstance(embedding, HostEmbedding)
    assert embedding.table.data_ptr() == table.data_ptr()
    assert embedding.table.dtype == torch.bfloat16


def test_closed_embedding_raises(table: torch.Tensor) -> None:
    buffer = PinnedBuffer(table.nbytes)
    view = torch.frombuffer(buffer.view(), dtype=torch.bfloat16).reshape(table.shape)
    view.copy_(table)
    embedding = HostEmbedding(view, buffer=buffer)
    assert torch.equal(embedding(torch.tensor([1])), table[1:2])
    embedding.close()
    with pytest.raises(ftw.ClosedError):
        embedding(torch.tensor([1]))
    embedding.close()
    assert embedding.num_embeddings == 50


def test_copy_of_a_module_gives_equal_rows(table: torch.Tensor) -> None:
    copied = copy.deepcopy(HostEmbedding(table))
    assert torch.equal(copied(torch.arange(50)), table)


def test_shard_gives_rows_of_its_own_ids_and_zeros_for_others(table: torch.Tensor) -> None:
    shard = HostEmbedding(table, vocab_range=(100, 40))
    ids = torch.tensor([[100, 139], [99, 140], [0, 39], [-1, 149]])
    found = shard(ids)
    assert torch.equal(found[0], table[[0, 39]])
    assert not found[1:].count_nonzero()
    assert (shard.num_embeddings, shard.vocab_range) == (40, (100, 40))
    assert shard.table.data_ptr() == table.data_ptr()
    assert repr(shard).endswith("placement='host', vocab_range=(100, 40))")


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("start", [0, 1, 7, 2**31 - 1, 2**63 - 51], ids=str)
def test_shard_masks_extreme_ids(table: torch.Tensor, start: int, id_dtype: torch.dtype) -> None:
    """The lowest id less the shard's first one wraps around to a number that could be a row's."""
    extremes = torch.iinfo(id_dtype)
    values = {extremes.min, extremes.min + start, extremes.min + 49, extremes.max, -1, 0, start, start + 49, start + 50}
    ids = [value for value in sorted(values) if extremes.min <= value <= extremes.max]
    found = HostEmbedding(table, vocab_range=(start, 50))(torch.tensor(ids, dtype=id_dtype))
    for row, value in zip(found, ids, strict=True):
        is_inside = start <= value < start + 50
        assert torch.equal(row, table[value - start] if is_inside else torch.zeros_like(row))


def test_shards_sum_up_to_the_table(table: torch.Tensor) -> None:
    ids = torch.arange(-2, 53)
    shards = [HostEmbedding(table[start:], vocab_range=(start, min(16, 50 - start))) for start in range(0, 50, 16)]
    assert torch.equal(sum(shard(ids) for shard in shards), HostEmbedding(table)(ids))


def test_shard_without_rows_gives_zeros(table: torch.Tensor) -> None:
    assert not HostEmbedding(table, vocab_range=(64, 0))(torch.tensor([63, 64, 65])).count_nonzero()


def test_whole_table_is_a_range_too(table: torch.Tensor) -> None:
    assert HostEmbedding(table).vocab_range == (0, 50)


@pytest.mark.parametrize(
    "vocab_range",
    [
        (-1, 5), (0, 51), (0, -1), (2**63 - 50, 50), (2**64, 0),
        5, (1, 2, 3), (0.0, 3), (0, 3.0), (True, 3), (0, True), ("a", 3), "ab", {0, 1},
    ],
    ids=str,
)  # fmt: skip
def test_embedding_refuses_a_range(table: torch.Tensor, vocab_range: tuple[int, int]) -> None:
    with pytest.raises(ftw.LookupArgumentError, match=r"vocab_range: found .* 50 rows, is needed") as caught:
        HostEmbedding(table, vocab_range=vocab_range)
    assert len(str(caught.value).splitlines()) == 1


def test_rows_go_into_out(table: torch.Tensor) -> None:
    ids = torch.tensor([[1, 2], [3, 50]])
    for dtype in (torch.bfloat16, torch.float32):
        embedding = HostEmbedding(table, dtype=dtype)
        out = torch.full((2, 2, 12), float("nan"), dtype=dtype)
        assert embedding(ids, out=out) is out
        assert torch.equal(out, embedding(ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["same", "converted"])
@pytest.mark.parametrize(
    "out",
    [
        pytest.param(torch.empty(2, 11), id="shape"),
        pytest.param(torch.empty(12, 2).T, id="strides"),
        pytest.param(torch.empty(2, 12, dtype=torch.float64), id="dtype"),
        pytest.param(torch.empty(2, 12, device="meta"), id="device"),
    ],
)
def test_embedding_refuses_out(table: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
    out = out.to(dtype) if out.dtype == torch.float32 else out
    with pytest.raises(ftw.LookupArgumentError, match=r"out: .* is needed"):
        HostEmbedding(table, dtype=dtype)(torch.tensor([0, 1]), out=out)


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_rows_are_scaled_in_the_tables_dtype(table: torch.Tensor, dtype: torch.dtype | None) -> None:
    """As Gemma does it: the scale is rounded to the embedding's dtype, the product too, and then it is converted."""
    scale = 12**0.5
    embedding = HostEmbedding(table, scale=scale, dtype=dtype)
    wanted = table * torch.tensor(scale, dtype=table.dtype)
    assert torch.equal(embedding(torch.arange(50)), wanted.to(dtype or table.dtype))
    assert not torch.equal(wanted.float(), table.float() * scale)
    assert embedding.scale == scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_packed_rows_are_scaled_once_they_are_decoded(dtype: torch.dtype) -> None:
    packed = random_table("Q5_0", 9, 64)
    ids = torch.tensor([0, 8, 9])
    rows = expected(packed, ids, "Q5_0", torch.float32 if dtype == torch.float64 else dtype)
    wanted = (rows * torch.tensor(5.7, dtype=rows.dtype)).to(dtype)
    assert_equal_rows(HostEmbedding(packed, ggml_type="Q5_0", scale=5.7, dtype=dtype)(ids), wanted)


@pytest.mark.parametrize(
    "scale", [0.0, float("nan"), float("inf"), "2", True, 10**400, Fraction(10**400), 10**5000, 2j], ids=lambda _: ""
)
def test_embedding_refuses_a_scale(table: torch.Tensor, scale: object) -> None:
    with pytest.raises(ftw.LookupArgumentError, match=r"wte: scale: found .* is needed"):
        HostEmbedding(table, name="wte", scale=scale)


def test_integers_are_not_scaled() -> None:
    with pytest.raises(ftw.LookupArgumentError, match=r"scale: found rows of torch.int8"):
        HostEmbedding(torch.zeros(4, 4, dtype=torch.int8), scale=2.0)


def test_layers_give_slices_of_the_row(table: torch.Tensor) -> None:
    embedding = HostEmbedding(table, num_slices=3, dtype=torch.float32)
    ids = torch.tensor([[7, 50], [0, 49]])
    whole = embedding(ids)
    assert (embedding.embedding_dim, embedding.num_slices, whole.shape) == (12, 3, (2, 2, 12))
    for layer in range(3):
        assert torch.equal(embedding(ids, layer=layer), whole[..., 4 * layer : 4 * layer + 4])


def test_layers_of_packed_rows_are_whole_blocks() -> None:
    packed = random_table("Q4_0", 9, 192)
    embedding = HostEmbedding(packed, ggml_type="Q4_0", num_slices=3)
    ids = torch.tensor([0, 8, 9])
    assert_equal_rows(embedding(ids, layer=1), expected(packed, ids, "Q4_0", torch.bfloat16)[:, 64:128].contiguous())
    with pytest.raises(ftw.LookupArgumentError, match=r"num_slices: found 4, slices of whole blocks of 32"):
        HostEmbedding(packed, ggml_type="Q4_0", num_slices=4)


@pytest.mark.parametrize("num_slices", [0, -1, 5, 1.5, True], ids=str)
def test_embedding_refuses_slices(table: torch.Tensor, num_slices: object) -> None:
    with pytest.raises(ftw.LookupArgumentError, match=r"wte: num_slices: found"):
        HostEmbedding(table, name="wte", num_slices=num_slices)


@pytest.mark.parametrize("layer", [-1, 3, 1.0, "1", True, np.int64(3)], ids=repr)
def test_embedding_refuses_a_layer(table: torch.Tensor, layer: object) -> None:
    with pytest.raises(ftw.LookupArgumentError, match=r"wte: layer: found .*, allowed are 0 to 2"):
        HostEmbedding(table, name="wte", num_slices=3)(torch.tensor([1]), layer=layer)
    with pytest.raises(ftw.LookupArgumentError, match=r"wte: layer: found .*, but rows have no slices"):
        HostEmbedding(table, name="wte")(torch.tensor([1]), layer=layer)


def test_numbers_of_numpy_are_numbers(table: torch.Tensor) -> None:
    embedding = HostEmbedding(
        table, vocab_range=(np.int64(3), np.uint8(20)), scale=np.float32(2), num_slices=np.int16(3)
    )
    ids = torch.arange(30)
    found = embedding(ids, layer=np.int64(1))
    assert torch.equal(found, HostEmbedding(table, vocab_range=(3, 20), scale=2.0, num_slices=3)(ids, layer=1))
    assert [type(number) for number in (*embedding.vocab_range, embedding.scale, embedding.num_slices)] == [
        int, int, float, int
    ]  # fmt: skip


def test_table_that_is_not_contiguous_is_refused(table: torch.Tensor) -> None:
    for other in (table.T, table[:, 1:]):
        with pytest.raises(
            ftw.LookupArgumentError, match=r"wte: table: found .*, contiguous \[rows, columns\] is needed"
        ):
            HostEmbedding(other, name="wte")


def test_name_is_shown_in_one_line(table: torch.Tensor) -> None:
    name = "a\nb"
    embedding = HostEmbedding(table, name=name, num_slices=3)
    ids = torch.tensor([1])
    for fail in (
        lambda: HostEmbedding(table[0], name=name),
        lambda: HostEmbedding(table, name=name, dtype=torch.int8),
        lambda: HostEmbedding(table, name=name, vocab_range=(0, 51)),
        lambda: HostEmbedding(table, name=name, scale=0.0),
        lambda: HostEmbedding(table, name=name, num_slices=5),
        lambda: HostEmbedding(table, name=name, hot_rows=-1),
        lambda: embedding(ids, layer=3),
        lambda: embedding(ids, out=torch.empty(1)),
        lambda: embedding([1]),
        embedding.wait,
        embedding.update_hot_rows,
    ):
        with pytest.raises(ftw.LookupArgumentError) as caught:
            fail()
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("ids", [[1], 1, None], ids=repr)
def test_embedding_refuses_ids_that_are_no_tensor(table: torch.Tensor, ids: object) -> None:
    with pytest.raises(ftw.LookupArgumentError, match=r"ids: found a .*, a tensor is needed"):
        HostEmbedding(table)(ids)


def test_copies_share_the_table_and_its_end(table: torch.Tensor) -> None:
    model = nn.Sequential(HostEmbedding(table, hot_rows=4), nn.Linear(12, 3, dtype=torch.bfloat16))
    copied = copy.deepcopy(model)
    one, other = model[0], copied[0]
    assert isinstance(one, HostEmbedding)
    assert isinstance(other, HostEmbedding)
    assert one is not other
    assert other.table is table
    one(torch.tensor([5]))
    other.update_hot_rows()
    assert one.hot_ids().tolist() == [5]
    one.close()
    with pytest.raises(ftw.ClosedError):
        other(torch.tensor([5]))


def test_pickling_is_refused(table: torch.Tensor) -> None:
    model = nn.Sequential(HostEmbedding(table, name="wte.weight", hot_rows=4))
    for save in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
        with pytest.raises(TypeError, match=r"wte.weight: table: is memory of this process, which cannot be pickled"):
            save(model)
    assert model.state_dict() == {}


def test_moving_and_casting_leaves_hot_rows_alone(table: torch.Tensor) -> None:
    model = nn.Sequential(HostEmbedding(table, hot_rows=4)).half().to("meta").double()
    embedding = model[0]
    assert isinstance(embedding, HostEmbedding)
    embedding.set_hot_rows([1])
    assert torch.equal(embedding(torch.arange(50)), table)


def test_rows_need_no_gradient(table: torch.Tensor) -> None:
    assert not HostEmbedding(table, scale=2.0)(torch.tensor([1])).requires_grad


def test_table_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(ftw.LookupArgumentError, match=r"^table: table: found a list, a tensor is needed$"):
        HostEmbedding([1.0])  # type: ignore[arg-type]
