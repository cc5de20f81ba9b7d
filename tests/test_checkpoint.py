from pathlib import Path

import numpy as np
import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint

import ftw

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
    from builders import safetensors_bytes, tensor_entry

    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes({"n" * 1_000_000: tensor_entry("F99", [1], 0, 4)}))
    with pytest.raises(ftw.CheckpointError) as caught:
        ftw.open_checkpoint(tmp_path)
    assert len(str(caught.value)) < 10_000
