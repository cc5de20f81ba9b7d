"""Tables spread over ranks: four processes with gloo, and groups of the first one, two and three of them."""

import copy
import dataclasses
import itertools
import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.distributed as dist
from builders import llama_config, llama_tensors, write_checkpoint
from gguf import GGMLQuantizationType, GGUFValueType
from gguf_builder import random_blocks, write_gguf
from packed_tables import assert_equal_rows
from tp_tables import TABLE, as_bytes, special_rows, wanted_rows, write_table

import ftw
from ftw.checkpoint.checkpoint import Checkpoint
from ftw.lookup.sharded_embedding import ShardedEmbedding

SIZE = 4
SIZES = pytest.mark.parametrize("size", [1, 2, 3, 4], ids="{}-ranks".format)


class Ranks:
    """Processes that run a function each, all at once."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(SIZE):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, str(folder / "rendezvous"), theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def __call__(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return what `function(group, *arguments)` returns on each of the first `size` ranks."""
        for pipe in self._pipes[:size]:
            pipe.send((size, function, arguments))
        answers = [pipe.recv() for pipe in self._pipes[:size]]
        for problem, _ in answers:
            assert not problem, problem
        return [answer for _, answer in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
            pipe.close()
        for process in self._processes:
            process.join()
            process.close()


def _serve(rank: int, rendezvous: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=SIZE)
    groups = {size: dist.new_group(list(range(size))) for size in range(1, SIZE + 1)}
    while (request := pipe.recv()) is not None:
        size, function, arguments = request
        try:
            pipe.send(("", function(groups[size], *arguments)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    made = Ranks(tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


@dataclasses.dataclass
class Found:
    """What one rank has of a table, as bytes: a tensor would travel through shared memory."""

    rows: bytes
    table: bytes
    vocab_range: tuple[int, int]
    num_embeddings: int
    pinned_bytes: int
    read: list[tuple[str, int, int]]  # name, first byte, number of bytes


def look_up(group: dist.ProcessGroup, source: Path, ids: torch.Tensor, name: str = "", **options: Any) -> Found:
    """Load, note what is read of the tables, and look ids up."""
    read: list[tuple[str, int, int]] = []
    real = Checkpoint._read

    def record(self: Checkpoint, wanted: Any, num_threads: int | None, **options: Any) -> None:
        read.extend((tensor.name, offset, len(view)) for tensor, view, offset in wanted)
        real(self, wanted, num_threads, **options)

    def read_many(self: Checkpoint, requests: Any, *, num_threads: int | None = None) -> None:
        Checkpoint._read = record  # type: ignore[method-assign]
        try:
            real_many(self, requests, num_threads=num_threads)
        finally:
            Checkpoint._read = real  # type: ignore[method-assign]

    real_many, Checkpoint.read_many = Checkpoint.read_many, read_many  # type: ignore[method-assign]
    try:
        with ftw.load(source, embed="host", device="cpu", tp=group, **options) as model:
            embedding = model.tables[name] if name else model.embedding
            assert isinstance(embedding, ShardedEmbedding)
            rows = embedding(ids)
            assert rows.shape == (*ids.shape, embedding.embedding_dim)
            assert rows.dtype == embedding.dtype
            return Found(
                as_bytes(rows), as_bytes(embedding.table), embedding.vocab_range, embedding.num_embeddings,
                model.memory.pinned_bytes[embedding.name], read,
            )  # fmt: skip
    finally:
        Checkpoint.read_many = real_many  # type: ignore[method-assign]


def as_rows(content: bytes, like: torch.Tensor) -> torch.Tensor:
    if not content:
        return torch.empty_like(like)
    return torch.frombuffer(bytearray(content), dtype=like.dtype).reshape(like.shape)


def ids_of(rows: int) -> torch.Tensor:
    """Return every id in another order, some twice, and ids outside: padding, the first one after, the extremes."""
    outside = [-1, -100, rows, rows + 1, 2**31, 2**63 - 1, -(2**63)]
    return torch.tensor([*reversed(range(rows)), *range(0, rows, 3), *outside])


@SIZES
@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [
        pytest.param(64, 8, torch.bfloat16, id="even"),
        pytest.param(67, 8, torch.bfloat16, id="uneven"),
        pytest.param(3, 8, torch.bfloat16, id="fewer-rows-than-ranks"),
        pytest.param(1, 2, torch.float32, id="one-row"),
        pytest.param(13, 7, torch.bfloat16, id="14-byte-rows"),
        pytest.param(13, 5, torch.float8_e4m3fn, id="5-byte-rows"),
        pytest.param(2051, 1024, torch.float16, id="pages"),
    ],
)
def test_sum_over_ranks_is_the_whole_table_in_every_bit(
    ranks: Ranks, tmp_path: Path, size: int, rows: int, columns: int, dtype: torch.dtype
) -> None:
    table = special_rows(rows, columns, dtype)
    ids = ids_of(rows)
    found = ranks(size, look_up, write_table(tmp_path / "m", table), ids)
    row_nbytes = columns * dtype.itemsize
    assert len({one.rows for one in found}) == 1
    assert found[0].rows == as_bytes(wanted_rows(table, ids))
    assert b"".join(one.table for one in found) == as_bytes(table)
    start = 0
    for rank, one in enumerate(found):
        length = rows // size + (rank < rows % size)
        assert (one.vocab_range, one.num_embeddings) == ((start, length), rows)
        assert one.read == ([(TABLE, start * row_nbytes, length * row_nbytes)] if length else [])
        assert one.pinned_bytes == length * row_nbytes
        start += length


@SIZES
@pytest.mark.parametrize("is_ftw", [False, True], ids=["gguf", "ftw"])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "BF16"])
def test_gguf_table_is_spread_packed(ranks: Ranks, tmp_path: Path, size: int, name: str, is_ftw: bool) -> None:
    source, blocks = write_packed(tmp_path, GGMLQuantizationType[name])
    if is_ftw:
        ftw.convert(source, tmp_path / "out", embed="host")
        source = tmp_path / "out"
    ids = ids_of(11)[None]
    with ftw.load(source, embed="host", device="cpu") as model:
        whole = model.embedding(ids)
    found = ranks(size, look_up, source, ids)
    assert b"".join(one.table for one in found) == blocks
    for one in found:
        assert_equal_rows(as_rows(one.rows, whole), whole)
        assert sum(nbytes for _, _, nbytes in one.read) == one.vocab_range[1] * len(blocks) // 11


def write_packed(folder: Path, kind: GGMLQuantizationType) -> tuple[Path, bytes]:
    """Write an untied GGUF with a table of 11 rows, and return it and the table's bytes."""
    table = random_blocks(kind, rows=11, blocks=512 // gguf.GGML_QUANT_SIZES[kind][0])
    kvs = {
        "llama.block_count": (GGUFValueType.UINT32, 1),
        "llama.embedding_length": (GGUFValueType.UINT32, 512),
        "tokenizer.ggml.tokens": (GGUFValueType.ARRAY, [f"t{number}" for number in range(11)]),
    }
    head = np.ones((11, 512), np.float32)
    path = write_gguf(folder / "m.gguf", {"token_embd.weight": table, "output.weight": head}, kvs)
    return path, table.data.tobytes()


@pytest.mark.parametrize("size", [2, 4], ids="{}-ranks".format)
def test_values_are_rounded_before_the_sum(ranks: Ranks, tmp_path: Path, size: int) -> None:
    source, _ = write_packed(tmp_path, GGMLQuantizationType.Q8_0)
    for dtype in (torch.float32, torch.float64):
        with ftw.load(source, embed="host", device="cpu", dtype=dtype) as model:
            whole = model.embedding(ids_of(11))
        for one in ranks(size, run_with_dtype, source, ids_of(11), str(dtype).removeprefix("torch.")):
            assert_equal_rows(as_rows(one.rows, whole), whole)


def run_with_dtype(group: dist.ProcessGroup, source: Path, ids: torch.Tensor, dtype: str) -> Found:
    return look_up(group, source, ids, dtype=getattr(torch, dtype))


@SIZES
def test_ngram_table_of_several_tensors_is_spread_over_their_borders(ranks: Ranks, tmp_path: Path, size: int) -> None:
    parts = {
        f"model.ngram_embedding.shard_{number}.weight": special_rows(rows, 6, torch.bfloat16)
        for number, rows in enumerate((5, 1, 8, 3))
    }
    write_checkpoint(tmp_path / "m", {**llama_tensors(), **parts}, llama_config())
    table = torch.cat(list(parts.values()))
    ids = ids_of(17)
    found = ranks(size, look_up, tmp_path / "m", ids, "model.ngram_embedding")
    assert all(one.rows == as_bytes(wanted_rows(table, ids)) for one in found)
    assert b"".join(one.table for one in found) == as_bytes(table)
    read = [[(name, start, nbytes) for name, start, nbytes in one.read if name in parts] for one in found]
    assert [sum(nbytes for _, _, nbytes in some) for some in read] == [one.vocab_range[1] * 12 for one in found]
    pieces = sorted(itertools.chain.from_iterable(read))
    for name, part in parts.items():  # each of its bytes once
        runs = [(start, nbytes) for piece, start, nbytes in pieces if piece == name]
        assert [start for start, _ in runs] == [0, *np.cumsum([nbytes for _, nbytes in runs])[:-1].tolist()]
        assert sum(nbytes for _, nbytes in runs) == part.nbytes


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", llama_tensors(), llama_config())


def use(group: dist.ProcessGroup, source: Path) -> str:
    """Use an embedding in the ways beside a plain lookup."""
    with ftw.load(source, embed="auto", device="cpu", tp=group) as model:
        embedding = model.embedding
        assert isinstance(embedding, ShardedEmbedding)
        ids = torch.arange(64)
        whole = embedding(ids)
        assert embedding(torch.empty(0, 3, dtype=torch.int32)).shape == (0, 3, 8)
        assert torch.equal(embedding(torch.tensor(5)), whole[5])
        assert torch.equal(embedding.reduce(embedding.shard(ids)), whole)
        copied = copy.deepcopy(torch.nn.Sequential(embedding, torch.nn.Linear(8, 8)))
        copied.half()
        assert not [name for name in copied.state_dict() if not name.startswith("1.")]
        assert torch.equal(copied[0](ids), whole)
        misaligned = torch.empty(64 * 8 + 1, dtype=whole.dtype)[1:].view(64, 8)
        with pytest.raises(ftw.LookupArgumentError, match=r"out: found address .*, a multiple of 4 is needed"):
            embedding(ids, out=misaligned)
        assert embedding.name in model.tables
        assert embedding.name not in dict(model.weights())
        out = torch.empty_like(whole)
        assert embedding(ids, out=out) is out
        assert torch.equal(out, whole)
        started = [embedding.prefetch(ids[:number]) for number in (3, 2, 4)]
        assert torch.equal(started[1].wait(), whole[:2])
        assert torch.equal(embedding.wait(), whole[:3])
        assert torch.equal(started[2].wait(), whole[:4])
        start, length = embedding.vocab_range
        alone = embedding.shard(ids)
        assert torch.equal(alone[start : start + length], embedding.table)
        assert alone.count_nonzero() == embedding.table.count_nonzero()
        return repr(embedding)


@pytest.mark.parametrize("size", [1, 3], ids="{}-ranks".format)
def test_embedding_is_used_like_any_other(ranks: Ranks, source: Path, size: int) -> None:
    assert [f"rank={rank}, size={size}" in found for rank, found in enumerate(ranks(size, use, source))] == [
        True
    ] * size


def use_hot(group: dist.ProcessGroup, source: Path, hot_bytes: int) -> tuple[list[int], bool]:
    with ftw.load(source, embed="host", device="cpu", tp=group, hot_bytes=hot_bytes) as model:
        embedding = model.embedding
        assert isinstance(embedding, ShardedEmbedding)
        ids = torch.tensor([63, 63, 1, 1, 0, 0])
        whole = embedding(ids)
        embedding.update_hot_rows()
        found = embedding.hot_ids()
        assert torch.equal(embedding(ids), whole)
        embedding.set_hot_rows([])
        assert embedding.hot_ids().tolist() == []
        embedding.set_hot_rows(found)
        assert embedding.hot is embedding.shard.hot
        assert embedding.scale is None
        embedding.prefetch(ids)
        embedding.drop_prefetches()
        return found.tolist(), embedding.hot is not None


def test_every_rank_has_hot_rows_of_its_own(ranks: Ranks, source: Path) -> None:
    assert ranks(2, use_hot, source, 2 * 16) == [([0, 1], True), ([63], True)]


def test_ranks_without_hot_rows_update_too(ranks: Ranks, source: Path, tmp_path: Path) -> None:
    assert ranks(2, use_hot, source, 15) == [([], False)] * 2
    table = special_rows(1, 8, torch.bfloat16)
    assert ranks(2, use_hot, write_table(tmp_path / "m", table), 64) == [([0], True), ([], False)]


def use_compiled(group: dist.ProcessGroup, source: Path) -> bool:
    with ftw.load(source, embed="host", device="cpu", tp=group) as model:
        step = torch.compile(lambda ids: model.embedding(ids) * 2, fullgraph=True, backend="aot_eager")
        return all(torch.equal(step(ids), model.embedding(ids) * 2) for ids in (torch.arange(66), torch.arange(65) - 1))


@pytest.mark.parametrize("size", [1, 2], ids="{}-ranks".format)
def test_embedding_is_compiled_into_one_graph(ranks: Ranks, source: Path, size: int) -> None:
    assert ranks(size, use_compiled, source) == [True] * size


def fail_on(group: dist.ProcessGroup, source: Path, failing: list[int]) -> tuple[str, str]:
    limit = 1 if group.rank() in failing else None
    try:
        ftw.load(source, embed="host", device="cpu", tp=group, max_pinned_bytes=limit)
    except ftw.FtwError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_rank_that_fails_fails_the_others(ranks: Ranks, source: Path) -> None:
    found = ranks(3, fail_on, source, [1])
    assert [kind for kind, _ in found] == ["FtwError", "PinError", "FtwError"]
    assert found[0][1] == f"{source}: tp: 1 of 3 ranks could not load it, their errors say why"
    assert [kind for kind, _ in ranks(3, fail_on, source, [0, 1, 2])] == ["PinError"] * 3
    assert ranks(3, fail_on, source, []) == [("", "")] * 3  # nothing is left over


def load_tied(group: dist.ProcessGroup, source: Path) -> tuple[str, bytes]:
    with ftw.load(source, embed="auto", device="cpu", tp=group) as model:
        return model.embedding.placement, as_bytes(model.embedding(torch.arange(64)))


def test_table_that_stays_is_whole_on_each_rank(ranks: Ranks, tmp_path: Path) -> None:
    tied = write_checkpoint(tmp_path / "tied", llama_tensors(head=False), llama_config(tie_word_embeddings=True))
    assert ranks(2, load_tied, tied) == [("gpu", as_bytes(llama_tensors()[TABLE]))] * 2


def refuse(group: dist.ProcessGroup, source: Path, options: dict[str, Any]) -> str:
    try:
        ftw.load(source, device="cpu", tp=group, **options)
    except ValueError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embed": "host", "share": "node"}, "each process of the host looks up all rows itself, and no collective"),
        ({"embed": "gpu"}, "tp cuts tables in host memory, embed='gpu' has none"),
        ({"embed": "host", "vocab_range": (0, 4)}, "tp chooses each rank's rows itself"),
        ({"embed": "disk"}, "embed is 'disk', allowed are"),
    ],
    ids=["share", "gpu", "vocab-range", "embed"],
)
def test_what_does_not_go_together_is_refused(
    ranks: Ranks, source: Path, options: dict[str, Any], message: str
) -> None:
    assert all(message in found for found in ranks(2, refuse, source, options))


def load_as_stranger(group: dist.ProcessGroup, source: Path) -> str:
    """Load with a group of rank 0 alone, and with the default one."""
    alone = dist.new_group([0])
    message = refuse(alone, source, {"embed": "host"})
    with ftw.load(source, embed="host", device="cpu", tp=True) as model:
        assert isinstance(model.embedding, ShardedEmbedding)
        assert model.embedding.group is dist.group.WORLD
    return message


def test_process_outside_of_the_group_is_refused(ranks: Ranks, source: Path) -> None:
    found = ranks(4, load_as_stranger, source)
    assert found[0] == "loaded"
    assert all("of which this process is a rank" in message for message in found[1:])


def test_tp_needs_a_process_group(source: Path) -> None:
    for tp in (True, "tp"):
        with pytest.raises(ValueError, match=r"^tp: torch.distributed has no process group yet"):
            ftw.load(source, embed="host", device="cpu", tp=tp)  # type: ignore[arg-type]
    with ftw.load(source, embed="host", device="cpu", tp=False) as model:
        assert isinstance(model.embedding, ftw.HostEmbedding)


def load_dummy(group: dist.ProcessGroup, source: Path) -> bool:
    with ftw.load(source, embed="host", device="cpu", tp=group, dummy=True) as model:
        rows = model.embedding(torch.arange(64))
        return bool(rows.isfinite().all() and rows.count_nonzero(dim=1).all())


def test_dummy_table_is_spread_too(ranks: Ranks, source: Path) -> None:
    assert ranks(3, load_dummy, source) == [True] * 3
