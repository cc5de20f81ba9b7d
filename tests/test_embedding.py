import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ftw
from ftw.embedding import HostEmbedding
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


@pytest.mark.parametrize("vocab_range", [(-1, 5), (0, 51), (0, -1), (2**63 - 50, 50), (2**64, 0)], ids=str)
def test_embedding_refuses_a_range(table: torch.Tensor, vocab_range: tuple[int, int]) -> None:
    with pytest.raises(ftw.LookupArgumentError, match=r"vocab_range: found .* 50 rows, is needed") as caught:
        HostEmbedding(table, vocab_range=vocab_range)
    assert len(str(caught.value).splitlines()) == 1
