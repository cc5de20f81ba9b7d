from pathlib import Path

import numpy as np
import pytest
import torch
from builders import llama_config, llama_tensors, safetensors_bytes, tensor_entry, write_checkpoint

import ftw
from ftw.files.parallel_read import Part, read_parts
from ftw.ggml_types import ggml_types_by_name, swapped_block

TABLE = "model.embed_tokens.weight"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m", {**llama_tensors(), "empty": torch.empty(0, 3)}, llama_config())


def test_checkpoint_tells_what_it_is(source: Path) -> None:
    with ftw.open_checkpoint(source) as checkpoint:
        assert checkpoint.format == "safetensors"
        assert checkpoint.source == str(source)
        assert checkpoint.config.architecture == "LlamaForCausalLM"
        assert set(checkpoint.tensors) == {*llama_tensors(), "empty"}
        assert checkpoint.nbytes == sum(tensor.nbytes for tensor in llama_tensors().values())


@pytest.mark.parametrize(
    "buffer",
    [
        pytest.param(bytearray(1024), id="bytearray"),
        pytest.param(np.empty(512, np.int16), id="int16"),
        pytest.param(np.empty((64, 8), np.int16), id="matrix"),
        pytest.param(memoryview(bytearray(2000))[8:1032], id="view"),
    ],
)
def test_read_into_fills_any_buffer(source: Path, buffer: object) -> None:
    expected = llama_tensors()[TABLE].view(torch.uint8).numpy().tobytes()
    with ftw.open_checkpoint(source) as checkpoint:
        checkpoint.read_into(TABLE, buffer)
    assert bytes(memoryview(buffer).cast("B")) == expected  # type: ignore[arg-type]


def test_read_into_reads_a_part(source: Path) -> None:
    expected = llama_tensors()[TABLE].view(torch.uint8).numpy().tobytes()
    part = bytearray(10)
    with ftw.open_checkpoint(source) as checkpoint:
        checkpoint.read_into(TABLE, part, offset=100)
    assert bytes(part) == expected[100:110]


@pytest.mark.parametrize("buffer", [bytearray(), np.empty((0, 3), np.float32)], ids=["bytearray", "matrix"])
def test_read_into_takes_an_empty_buffer(source: Path, buffer: object) -> None:
    with ftw.open_checkpoint(source) as checkpoint:
        checkpoint.read_into("empty", buffer)


@pytest.mark.parametrize(("size", "offset"), [(1025, 0), (1, 1024), (5, -1)], ids=["longer", "past_end", "negative"])
def test_read_into_refuses_what_lies_outside(source: Path, size: int, offset: int) -> None:
    with ftw.open_checkpoint(source) as checkpoint, pytest.raises(ftw.CheckpointError, match="it has 1024"):
        checkpoint.read_into(TABLE, bytearray(size), offset=offset)


def safetensors_file(folder: Path, nbytes: dict[str, int]) -> Path:
    """Write tensors of given sizes, at unaligned offsets, filled with a period prime to every block size."""
    header, end = {}, 0
    for name, count in nbytes.items():
        header[name] = tensor_entry("U8", [count], end, end + count)
        end += count
    (folder / "model.safetensors").write_bytes(safetensors_bytes(header, content(end)))
    return folder


def content(nbytes: int) -> bytes:
    return (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]


@pytest.mark.parametrize("num_threads", [None, 1, 3], ids="{}-threads".format)
def test_large_read_is_parallel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int | None) -> None:
    source = safetensors_file(tmp_path, {"first": 1001, "t": 33 << 20})
    calls = []

    def record(parts: list[Part], *, num_threads: int | None) -> None:
        calls.append(num_threads)
        read_parts(parts, num_threads=num_threads)

    monkeypatch.setattr("ftw.checkpoint.checkpoint.read_parts", record)
    buffer = bytearray(33 << 20)
    with ftw.open_checkpoint(source) as checkpoint:
        checkpoint.read_into("t", buffer, num_threads=num_threads)
        assert buffer == content(1001 + (33 << 20))[1001:]
        part = bytearray(16 << 20)
        checkpoint.read_into("t", part, offset=5)
        assert part == buffer[5 : 5 + len(part)]
    assert calls == [num_threads]


def test_read_many_fills_a_buffer_for_each_tensor(tmp_path: Path) -> None:
    nbytes = {"a": 1001, "b": 9 << 20, "none": 0, "c": 5, "d": 3 << 20}
    source = safetensors_file(tmp_path, nbytes)
    buffers = {name: bytearray(count) for name, count in nbytes.items()}
    with ftw.open_checkpoint(source) as checkpoint:
        checkpoint.read_many(((name, buffers[name], 0) for name in reversed(buffers)), num_threads=3)
        checkpoint.read_many([])
        again = np.empty(1001, np.uint8)
        checkpoint.read_many([("a", again, 0)])
    assert b"".join(buffers.values()) == content(sum(nbytes.values()))
    assert again.tobytes() == buffers["a"]


def test_read_many_fills_runs_of_tensors(tmp_path: Path) -> None:
    nbytes = {"a": 1001, "b": 9 << 20}
    source = safetensors_file(tmp_path, nbytes)
    whole = content(sum(nbytes.values()))
    runs = [("b", 5 << 20, 4 << 20), ("a", 3, 500), ("b", 0, 1), ("a", 1001, 0), ("b", 4 << 20, 3 << 20)]
    with ftw.open_checkpoint(source) as checkpoint:
        requests = [(name, bytearray(length), start) for name, start, length in runs]
        checkpoint.read_many(requests, num_threads=2)
    for name, buffer, start in requests:
        first = start + (1001 if name == "b" else 0)
        assert buffer == whole[first : first + len(buffer)]


@pytest.mark.parametrize(("size", "offset"), [(1025, 0), (1023, 2), (1, 1024), (3, -1)], ids=str)
def test_read_many_checks_every_run_before_it_reads(source: Path, size: int, offset: int) -> None:
    untouched = bytearray(1024)
    with ftw.open_checkpoint(source) as checkpoint:
        with pytest.raises(ftw.CheckpointError, match=f"bytes {offset} to {offset + size} were asked for, it has 1024"):
            checkpoint.read_many([(TABLE, untouched, 0), (TABLE, bytearray(size), offset)])
        with pytest.raises(ftw.UnknownTensorError, match="no tensor 'nope'"):
            checkpoint.read_many([(TABLE, untouched, 0), ("nope", bytearray(1), 0)])
        checkpoint.close()
        with pytest.raises(ftw.ClosedError):
            checkpoint.read_many([(TABLE, untouched, 0)])
    assert untouched == bytearray(1024)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "IQ2_XXS", "F32", "BF16"])
def test_big_endian_blocks_are_rearranged_wherever_a_read_begins(
    source: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    order = swapped_block(ggml_types_by_name()[name])
    assert order is not None
    monkeypatch.setattr("ftw.readers.gguf.byte_order._SWAP_NBYTES", 3 * len(order) + 1)
    count = 1024 // len(order) * len(order)
    stored = llama_tensors()[TABLE].view(torch.uint8).numpy().tobytes()[:count]
    blocks = [stored[start : start + len(order)] for start in range(0, count, len(order))]
    expected = bytes(block[source] for block in blocks for source in order)
    with ftw.open_checkpoint(source) as checkpoint:
        monkeypatch.setattr(type(checkpoint._reader), "block_order", lambda reader, tensor: order)
        for offset in {0, 1, len(order) - 1, len(order), len(order) + 3}:
            for nbytes in {0, 1, 2, len(order), len(order) + 1, 3 * len(order), count - offset}:
                nbytes = min(nbytes, count - offset)
                buffer = bytearray(b"x" * nbytes)
                checkpoint.read_into(TABLE, buffer, offset=offset)
                assert buffer == expected[offset : offset + nbytes]


def test_unknown_tensor_is_named(source: Path) -> None:
    with ftw.open_checkpoint(source) as checkpoint, pytest.raises(ftw.UnknownTensorError, match="no tensor 'nope'"):
        checkpoint.read_into("nope", bytearray(1))


def test_closed_checkpoint_refuses_reads_and_keeps_its_headers(source: Path) -> None:
    checkpoint = ftw.open_checkpoint(source)
    checkpoint.close()
    with pytest.raises(ftw.ClosedError):
        checkpoint.read_into(TABLE, bytearray(1024))
    assert TABLE in checkpoint.tensors


def test_endless_tensor_name_gives_a_short_message(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes({"n" * 1_000_000: tensor_entry("F99", [1], 0, 4)}))
    with pytest.raises(ftw.CheckpointError) as caught:
        ftw.open_checkpoint(tmp_path)
    assert len(str(caught.value)) < 10_000
