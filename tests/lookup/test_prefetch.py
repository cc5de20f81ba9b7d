"""Prefetches on a CPU, where they are done at once; tests/gpu/test_gpu_embedding.py has the side stream."""

import copy

import pytest
import torch

import ftw
from ftw.lookup import prefetch
from ftw.lookup.embedding import HostEmbedding
from ftw.lookup.prefetch import SideStreams

TABLE = torch.randn(50, 12, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)


@pytest.fixture
def embedding() -> HostEmbedding:
    return HostEmbedding(TABLE, name="ple.weight", num_slices=3)


def test_prefetched_rows_equal_those_looked_up(embedding: HostEmbedding) -> None:
    ids = torch.tensor([[3, 49], [50, -1]])
    handle = embedding.prefetch(ids)
    assert torch.equal(handle.wait(), embedding(ids))
    embedding.prefetch(ids)
    assert torch.equal(embedding.wait(), embedding(ids))


def test_prefetches_are_waited_for_in_their_order(embedding: HostEmbedding) -> None:
    for row in range(3):
        embedding.prefetch(torch.tensor([row]))
    assert [torch.equal(embedding.wait(), TABLE[row : row + 1]) for row in range(3)] == [True] * 3


def test_handle_takes_its_own_out_of_the_order(embedding: HostEmbedding) -> None:
    handles = [embedding.prefetch(torch.tensor([row])) for row in range(3)]
    assert torch.equal(handles[1].wait(), TABLE[1:2])
    assert torch.equal(embedding.wait(), TABLE[:1])
    assert torch.equal(embedding.wait(), TABLE[2:3])
    for handle in handles:
        with pytest.raises(ftw.LookupArgumentError, match=r"ple.weight: wait: this prefetch was waited for already"):
            handle.wait()
    with pytest.raises(ftw.LookupArgumentError, match=r"ple.weight: wait: found no prefetch"):
        embedding.wait()


def test_prefetch_of_one_layer(embedding: HostEmbedding) -> None:
    ids = torch.tensor([3, 4])
    assert torch.equal(embedding.prefetch(ids, layer=2).wait(), TABLE[ids, 8:])


def test_wait_without_prefetch_is_refused(embedding: HostEmbedding) -> None:
    with pytest.raises(ftw.LookupArgumentError, match=r"ple.weight: wait: found no prefetch, start one first"):
        embedding.wait()


def test_prefetch_that_is_refused_leaves_none(embedding: HostEmbedding) -> None:
    with pytest.raises(ftw.LookupArgumentError, match=r"ids: found"):
        embedding.prefetch(torch.tensor([0.5]))
    with pytest.raises(ftw.LookupArgumentError, match=r"ids: found a list"):
        embedding.prefetch([1])
    with pytest.raises(ftw.LookupArgumentError, match="found no prefetch"):
        embedding.wait()


def test_copy_has_prefetches_of_its_own(embedding: HostEmbedding) -> None:
    embedding.prefetch(torch.tensor([1]))
    with pytest.raises(ftw.LookupArgumentError, match="found no prefetch"):
        copy.deepcopy(embedding).wait()
    assert torch.equal(embedding.wait(), TABLE[1:2])


def test_closed_embedding_prefetches_nothing(embedding: HostEmbedding) -> None:
    embedding.close()
    with pytest.raises(ftw.ClosedError):
        embedding.prefetch(torch.tensor([1]))


def test_prefetches_of_a_step_that_failed_can_be_dropped(embedding: HostEmbedding) -> None:
    stale = embedding.prefetch(torch.tensor([1]))
    embedding.prefetch(torch.tensor([2]))
    embedding.drop_prefetches()
    embedding.drop_prefetches()
    embedding.prefetch(torch.tensor([3]))
    assert torch.equal(embedding.wait(), TABLE[3:4])
    with pytest.raises(ftw.LookupArgumentError, match="found no prefetch"):
        embedding.wait()
    with pytest.raises(ftw.LookupArgumentError, match="waited for already, or dropped"):
        stale.wait()


class FakeStream:
    """A stream that notes which ones it has been made to wait for."""

    def __init__(self, *, is_capturing: bool = False) -> None:
        self.device = torch.device("cuda", 0)
        self.is_capturing = is_capturing
        self.waited_for: list[FakeStream] = []

    def wait_stream(self, other: "FakeStream") -> None:
        self.waited_for.append(other)


@pytest.mark.parametrize("is_capturing", [False, True], ids=["eager", "captured"])
def test_updates_wait_for_the_side_streams_of_all_copies(
    embedding: HostEmbedding, monkeypatch: pytest.MonkeyPatch, is_capturing: bool
) -> None:
    """Whoever was waited for already, and on whichever stream; but a capture waits for none that is not in it."""
    current = FakeStream(is_capturing=is_capturing)
    made = [FakeStream(is_capturing=is_capturing), FakeStream(), FakeStream(is_capturing=True)]
    streams = iter(made)
    monkeypatch.setattr(prefetch, "_is_capturing", lambda stream: stream.is_capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: next(streams))
    copied = copy.deepcopy(embedding)
    assert copied._storage is embedding._storage
    for one in (embedding, copied, copy.deepcopy(copied)):
        assert one._prefetches._stream(current.device) is one._prefetches._stream(current.device)
    copied._storage.side_streams.join()
    assert len(current.waited_for) == 2
    assert {stream.is_capturing for stream in current.waited_for} == {is_capturing}


def test_tables_have_side_streams_of_their_own() -> None:
    assert HostEmbedding(TABLE)._storage.side_streams is not HostEmbedding(TABLE)._storage.side_streams
    SideStreams().join()
