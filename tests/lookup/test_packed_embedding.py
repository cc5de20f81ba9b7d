"""HostEmbedding of packed rows, on the CPU."""

import pytest
import torch
from packed_tables import TYPES, assert_equal_rows, dtype_name, expected, random_table

import ftw
from ftw.lookup.embedding import HostEmbedding


@pytest.mark.parametrize("name", TYPES)
def test_embedding_of_packed_rows(name: str) -> None:
    table = random_table(name, 9, 512)
    ids = torch.tensor([[0, 8], [9, 3]], dtype=torch.int32)
    embedding = HostEmbedding(table, ggml_type=name)
    assert (embedding.num_embeddings, embedding.embedding_dim) == (9, 512)
    assert (embedding.dtype, embedding.ggml_type) == (torch.bfloat16, name)
    assert embedding.table.data_ptr() == table.data_ptr()
    assert_equal_rows(embedding(ids), expected(table, ids, name, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=dtype_name)
def test_embedding_gives_the_dtype_it_was_told(dtype: torch.dtype) -> None:
    table, ids = random_table("Q3_K", 9, 768), torch.tensor([7, -1, 0])
    embedding = HostEmbedding(table, ggml_type="Q3_K", dtype=dtype)
    assert embedding.dtype == dtype
    assert_equal_rows(embedding(ids), expected(table, ids, "Q3_K", dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e5m2], ids=dtype_name)
def test_embedding_converts_from_float32_what_is_not_decoded(dtype: torch.dtype) -> None:
    table, ids = random_table("Q5_0", 9, 64), torch.tensor([7, 2, 99])
    found = HostEmbedding(table, ggml_type="Q5_0", dtype=dtype)(ids)
    wanted = expected(table, ids, "Q5_0", torch.float32).to(dtype)
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def test_embedding_tells_its_type() -> None:
    found = repr(HostEmbedding(random_table("Q4_0", 8, 256), ggml_type="Q4_0", placement="gpu"))
    assert found == "HostEmbedding(8, 256, dtype=torch.bfloat16, placement='gpu', ggml_type='Q4_0')"


@pytest.mark.parametrize(
    ("ggml_type", "words"),
    [("Q8_1", "ggml_type: found 'Q8_1'"), ("Q8_0", "whole blocks of 34 bytes")],
    ids=["type", "rows"],
)
def test_embedding_refuses(ggml_type: str, words: str) -> None:
    with pytest.raises(ftw.LookupArgumentError, match=words):
        HostEmbedding(torch.zeros(8, 40, dtype=torch.uint8), ggml_type=ggml_type)


def test_closed_embedding_of_packed_rows_raises() -> None:
    embedding = HostEmbedding(random_table("Q4_0", 8, 32), ggml_type="Q4_0")
    embedding.close()
    with pytest.raises(ftw.ClosedError):
        embedding(torch.tensor([1]))
    assert embedding.embedding_dim == 32
