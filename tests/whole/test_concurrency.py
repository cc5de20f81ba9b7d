"""One checkpoint, and one table, used by many threads and processes at once; and what closes while it is used."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint, write_ftw
from gguf import GGUFEndian
from gguf_builder import write_gguf
from inspecting import stored_bytes, tensor_bytes

import ftw
from ftw.lookup.embedding import HostEmbedding

TABLE = "model.embed_tokens.weight"
THREADS = 8


@pytest.fixture(params=["safetensors", "ftw", "gguf", "gguf-big-endian"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tensors = llama_tensors(dtype=torch.float32)
    if request.param == "safetensors":
        return write_checkpoint(tmp_path / "m", tensors, llama_config())
    if request.param == "ftw":
        return write_ftw(tmp_path / "m", tensors)
    order = {"order": GGUFEndian.BIG} if request.param == "gguf-big-endian" else {}
    return write_gguf(tmp_path / "m.gguf", {name: tensor.numpy() for name, tensor in tensors.items()}, **order)


def in_threads(function: Callable[[int], Any], count: int = THREADS) -> list[Any]:
    """Call a function in threads that all begin at the same time, and return what each returned."""
    barrier = threading.Barrier(count)

    def run(number: int) -> Any:
        barrier.wait()
        return function(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def test_checkpoint_is_read_by_many_threads(source: Path) -> None:
    expected = {name: tensor_bytes(tensor) for name, tensor in llama_tensors(dtype=torch.float32).items()}
    with ftw.open_checkpoint(source) as checkpoint:
        names = list(checkpoint.tensors)

        def read(number: int) -> bool:
            own = names[number % len(names) :] + names[: number % len(names)]
            return all(stored_bytes(checkpoint, name) == expected[name] for name in own * 5)

        assert in_threads(read) == [True] * THREADS


def test_checkpoint_is_opened_by_many_threads(source: Path) -> None:
    def open_and_close(number: int) -> tuple[list[str], bool | None]:
        with ftw.open_checkpoint(source) as checkpoint:
            names = list(checkpoint.tensors)
        return names, ftw.inspect(source).is_host_eligible

    first, *others = in_threads(open_and_close)
    assert others == [first] * (THREADS - 1)


READ = """
import hashlib, sys, ftw
with ftw.open_checkpoint(sys.argv[1]) as checkpoint:
    found = hashlib.sha256()
    for _ in range(20):
        for name, tensor in sorted(checkpoint.tensors.items()):
            buffer = bytearray(tensor.nbytes)
            checkpoint.read_into(name, buffer)
            found.update(buffer)
    print(found.hexdigest())
"""


def test_checkpoint_is_read_by_many_processes(source: Path) -> None:
    command = [sys.executable, "-c", READ, str(source)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 3
    assert len(set(outputs)) == 1
    assert len(outputs[0]) == 65


FORK = """
import os, sys, ftw
checkpoint = ftw.open_checkpoint(sys.argv[1])
name, tensor = next(iter(checkpoint.tensors.items()))
before = bytearray(tensor.nbytes)
checkpoint.read_into(name, before)
child = os.fork()
buffer = bytearray(tensor.nbytes)
checkpoint.read_into(name, buffer)
assert buffer == before
if not child:
    checkpoint.close()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
checkpoint.read_into(name, buffer)
"""


def test_checkpoint_is_read_on_both_sides_of_a_fork(source: Path) -> None:
    subprocess.run([sys.executable, "-c", FORK, str(source)], check=True, timeout=600)


def test_close_lets_a_read_that_has_begun_end(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = ftw.open_checkpoint(source)
    name, real = next(iter(checkpoint.tensors)), os.preadv
    expected = stored_bytes(checkpoint, name)

    def close_then_read(descriptor: int, views: list[memoryview], offset: int) -> int:
        checkpoint.close()
        return real(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", close_then_read)
    assert stored_bytes(checkpoint, name) == expected
    with pytest.raises(ftw.ClosedError, match="checkpoint: is closed"):
        stored_bytes(checkpoint, name)
    with pytest.raises(ftw.ClosedError):
        list(checkpoint.iter_chunks(name))


def test_close_ends_chunks_that_are_being_read(source: Path) -> None:
    checkpoint = ftw.open_checkpoint(source)
    chunks = checkpoint.iter_chunks(next(iter(checkpoint.tensors)), 8)
    next(chunks)
    checkpoint.close()
    with pytest.raises(ftw.ClosedError):
        next(chunks)


def test_close_ends_the_weights_that_are_being_loaded(tmp_path: Path) -> None:
    model = ftw.load(write_checkpoint(tmp_path, llama_tensors(), llama_config()), device="cpu")
    weights = model.weights()
    next(weights)
    model.close()
    with pytest.raises(ftw.ClosedError):
        next(weights)


@pytest.fixture(params=["plain", "packed", "hot"])
def embedding(request: pytest.FixtureRequest) -> Iterator[HostEmbedding]:
    numbers = torch.Generator().manual_seed(0)
    if request.param == "packed":
        blocks = np.random.default_rng(0).integers(0, 100, (50, 34), dtype=np.uint8)
        embedding = HostEmbedding(torch.from_numpy(blocks), ggml_type="Q8_0")
    else:
        hot_rows = 8 if request.param == "hot" else None
        embedding = HostEmbedding(torch.randn(50, 12, generator=numbers), hot_rows=hot_rows)
    yield embedding
    embedding.close()


def test_table_is_looked_up_by_many_threads(embedding: HostEmbedding) -> None:
    ids = [torch.arange(number, 50 + number) for number in range(THREADS)]
    expected = [embedding(own) for own in ids]

    def look_up(number: int) -> bool:
        own = [embedding(ids[number]) for _ in range(20)] + [embedding.prefetch(ids[number]).wait()]
        return all(
            bool(rows.isnan().eq(expected[number].isnan()).all()) and same(rows, expected[number]) for rows in own
        )

    assert in_threads(look_up) == [True] * THREADS


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def test_lookup_beside_a_close_is_right_or_refused(embedding: HostEmbedding) -> None:
    ids = torch.arange(50)
    expected = embedding(ids)

    def look_up(number: int) -> int:
        if not number:
            embedding.close()
            return 0
        wrong = 0
        for _ in range(50):
            try:
                wrong += not same(embedding(ids), expected)
            except ftw.ClosedError:
                break
        return wrong

    assert in_threads(look_up) == [0] * THREADS
    with pytest.raises(ftw.ClosedError):
        embedding(ids)


def test_table_that_stays_is_loaded_once_by_many_threads(tmp_path: Path) -> None:
    with ftw.load(write_checkpoint(tmp_path, llama_tensors(), llama_config()), device="cpu") as model:
        first, *others = in_threads(lambda number: model.embedding)
    assert all(other is first for other in others)


gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("hot_bytes", [None, "1KiB"], ids=["plain", "hot"])
def test_table_is_looked_up_by_many_threads_on_streams_of_their_own(tmp_path: Path, hot_bytes: str | None) -> None:
    source = write_checkpoint(tmp_path, llama_tensors(), llama_config())
    expected = llama_tensors()[TABLE].cuda()
    with ftw.load(source, embed="host", device="cuda:0", hot_bytes=hot_bytes) as model:
        ids = [torch.randint(0, 64, (257,), device="cuda:0") for _ in range(THREADS)]
        torch.cuda.synchronize()

        def look_up(number: int) -> bool:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                rows = [model.embedding(ids[number]) for _ in range(50)]
            stream.synchronize()
            return all(torch.equal(found, expected[ids[number]]) for found in rows)

        assert in_threads(look_up) == [True] * THREADS


@gpu
def test_table_is_looked_up_on_several_streams_at_once(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, llama_tensors(), llama_config())
    expected = llama_tensors()[TABLE].cuda()
    with ftw.load(source, embed="host", device="cuda:0") as model:
        ids = torch.randint(0, 64, (4097,), device="cuda:0")
        torch.cuda.synchronize()
        streams, rows = [torch.cuda.Stream() for _ in range(4)], []
        for _ in range(25):
            for stream in streams:
                with torch.cuda.stream(stream):
                    rows.append(model.embedding(ids))
        torch.cuda.synchronize()
        assert all(torch.equal(found, expected[ids]) for found in rows)


@gpu
def test_close_waits_for_lookups_that_are_queued(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, llama_tensors(), llama_config())
    expected = llama_tensors()[TABLE].cuda()
    model = ftw.load(source, embed="host", device="cuda:0")
    ids = torch.randint(0, 64, (4096,), device="cuda:0")
    model.embedding(ids)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        rows = model.embedding(ids)
    model.close()
    stream.synchronize()
    assert torch.equal(rows, expected[ids])
    with pytest.raises(ftw.ClosedError):
        model.tables[TABLE](ids)
