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
