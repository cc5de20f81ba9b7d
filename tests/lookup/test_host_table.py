"""Tables that are filled after they were allocated, and filled anew while they are looked up."""

from pathlib import Path

import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint

import ftw
from ftw.lookup.embedding import HostEmbedding

TABLE = torch.randn(20, 8, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
IDS = torch.tensor([0, 19, 7, 7, 20, -1])


def filled(**options: object) -> HostEmbedding:
    table = ftw.HostTable(20, 8, dtype=torch.bfloat16, name="embed", device="cpu")
    table.rows.copy_(TABLE)
    return table.finish(**options)  # type: ignore[arg-type]


def test_table_is_zeros_until_it_is_filled() -> None:
    table = ftw.HostTable(20, 8, dtype=torch.bfloat16, device="cpu")
    assert table.nbytes == 320
    assert torch.equal(table.rows, torch.zeros(20, 8, dtype=torch.bfloat16))
    table.close()


def test_finished_table_gives_its_rows() -> None:
    assert torch.equal(filled()(IDS), HostEmbedding(TABLE)(IDS))


def test_bytes_and_rows_are_the_same_memory() -> None:
    table = ftw.HostTable(2, 4, dtype=torch.uint8, device="cpu")
    table.view()[:] = bytes(range(8))
    assert table.rows.flatten().tolist() == list(range(8))


def test_options_are_those_of_the_embedding() -> None:
    embedding = filled(vocab_range=(100, 20), scale=2.0, hot_bytes=32, handle="embed of rank 1")
    assert (embedding.vocab_range, embedding.scale, embedding.handle) == ((100, 20), 2.0, "embed of rank 1")
    assert torch.equal(embedding(torch.tensor([119])), TABLE[19:] * 2)


def test_finished_table_hands_its_memory_out_no_more() -> None:
    table = ftw.HostTable(20, 8, dtype=torch.bfloat16, name="embed", device="cpu")
    embedding = table.finish()
    with pytest.raises(ftw.ClosedError, match="embed: table: is finished or closed"):
        table.rows  # noqa: B018
    with pytest.raises(ftw.ClosedError, match="embed: table"):
        table.finish()
    table.close()
    assert embedding(IDS).shape == (6, 8)


def test_table_that_could_not_be_finished_can_be_finished_otherwise() -> None:
    table = ftw.HostTable(20, 8, dtype=torch.bfloat16, device="cpu")
    with pytest.raises(ftw.LookupArgumentError, match="vocab_range"):
        table.finish(vocab_range=(0, 21))
    assert table.finish(vocab_range=(0, 20)).num_embeddings == 20


@pytest.mark.parametrize(("rows", "columns"), [(-1, 8), (20, "8"), (2.5, 8)], ids=["negative", "text", "fraction"])
def test_shape_that_is_none_is_refused(rows: object, columns: object) -> None:
    with pytest.raises(ftw.LookupArgumentError, match="embed: table: found"):
        ftw.HostTable(rows, columns, dtype=torch.bfloat16, name="embed")  # type: ignore[arg-type]


def test_table_beyond_the_callers_limit_is_refused_before_it_is_allocated() -> None:
    with pytest.raises(ftw.PinError, match=r"host table: embed .*more than max_pinned_bytes"):
        ftw.HostTable(1 << 20, 1 << 10, dtype=torch.bfloat16, name="embed", device="cpu", max_pinned_bytes="1MiB")


def test_refilled_table_gives_the_new_rows() -> None:
    embedding = filled()
    with embedding.refill() as rows:
        rows.copy_(TABLE * 3)
    assert torch.equal(embedding(IDS), HostEmbedding(TABLE * 3)(IDS))


def test_same_ids_are_hot_with_their_new_rows_after_a_refill() -> None:
    embedding = filled(hot_bytes=48)
    embedding.set_hot_rows([4, 9])
    with embedding.refill() as rows:
        assert embedding.hot_ids().tolist() == []
        rows.copy_(TABLE * 3)
    assert embedding.hot_ids().tolist() == [4, 9]
    assert embedding.hot is not None
    slots = embedding.hot.slots[[4, 9]].long()
    assert torch.equal(embedding.hot.rows[slots], TABLE[[4, 9]] * 3)


def test_hot_rows_come_back_where_a_refill_fails() -> None:
    embedding = filled(hot_bytes=48)
    embedding.set_hot_rows([4, 9])
    with pytest.raises(RuntimeError, match="stop"), embedding.refill():
        raise RuntimeError("stop")
    assert embedding.hot_ids().tolist() == [4, 9]


def test_closed_table_is_not_refilled() -> None:
    embedding = filled()
    embedding.close()
    with pytest.raises(ftw.ClosedError), embedding.refill():
        pass


def test_table_that_processes_share_is_not_refilled(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, llama_tensors(), llama_config())
    with (
        ftw.load(source, embed="host", device="cpu", share="node") as model,
        pytest.raises(ftw.LookupArgumentError, match="is shared by the processes of this host"),
        model.embedding.refill(),
    ):
        pass
