"""FreeToken's own reader and writer, out of its 0.2.1 wheel: they read what ftw writes and write what ftw reads.

The wheel's one module for the format is loaded alone, with a logger and a progress bar in place of the rest of its
package, which needs a GPU's libraries.
"""

import importlib.util
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint

import ftw

SPEC = importlib.util.find_spec("freetoken")
pytestmark = pytest.mark.skipif(SPEC is None, reason="freetoken's wheel exists for x86-64 Linux alone")


@pytest.fixture(scope="module")
def freetoken() -> Iterator[Any]:
    """Return FreeToken's module for the format."""
    stand_ins = {
        "freetoken": {"__path__": []},
        "freetoken.utils": {"__path__": [], "init_logger": lambda *_, **__: logging.getLogger("freetoken")},
        "freetoken.utils.progress": {"byte_bar": lambda *_, **__: MagicMock()},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, attributes in stand_ins.items():
            module = types.ModuleType(name)
            vars(module).update(attributes)
            patch.setitem(sys.modules, name, module)
        assert SPEC is not None
        assert SPEC.origin is not None
        file = Path(SPEC.origin).parent / "checkpoint" / "ftw.py"
        spec = importlib.util.spec_from_file_location("freetoken_checkpoint_ftw", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


def many_tensors() -> dict[str, torch.Tensor]:
    """Return tensors that fill several small shards, span them, and leave some of them short."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(64, 8), (3000,), (5000, 3), (), (1, 1), (2048,), (2049,), (100, 100), (7,), (20000,)]
    tensors = {f"layers.{n}.weight": torch.randn(shape, generator=generator) for n, shape in enumerate(shapes)}
    return {
        **llama_tensors(),
        **tensors,
        "flags": torch.tensor([True, False]),
        "codes": torch.arange(9).to(torch.uint8),
    }


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def test_freetoken_reads_what_ftw_writes(freetoken: Any, tmp_path: Path) -> None:
    tensors = many_tensors()
    source = write_checkpoint(tmp_path / "source", tensors, llama_config())
    ftw.convert(source, tmp_path / "out", embed="host", shard_limit=16384)
    assert freetoken.is_ftw_checkpoint(str(tmp_path / "out"))
    assert set(freetoken.ftw_tensor_names(str(tmp_path / "out"), "weight")) == set(tensors)
    seen = {name: tensor.clone() for name, tensor in freetoken.iter_ftw_weights(str(tmp_path / "out"))}
    assert set(seen) == set(tensors)
    for name, tensor in tensors.items():
        assert seen[name].dtype == tensor.dtype
        assert seen[name].shape == tensor.shape
        assert torch.equal(as_bits(seen[name]), as_bits(tensor))


def test_ftw_reads_what_freetoken_writes(freetoken: Any, tmp_path: Path) -> None:
    tensors = many_tensors()
    writer = freetoken.FTWWriter(str(tmp_path), shard_limit=16384)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.add_tensor("gate_up#L00003", torch.ones(4, 6, 2), "experts_bank")
    writer.finalize({"fingerprint": "abc", "quant_format": "bf16", "side_files": []})
    with ftw.open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.metadata["fingerprint"] == "abc"
        assert checkpoint.tensors["gate_up#L00003"].kind == "experts_bank"
        assert len(checkpoint.tensors) == len(tensors) + 1
        for name, tensor in tensors.items():
            found = bytearray(checkpoint.tensors[name].nbytes)
            checkpoint.read_into(name, found)
            assert checkpoint.tensors[name].shape == tuple(tensor.shape)
            assert bytes(found) == bytes(as_bits(tensor).tolist())
    assert ftw.verify(tmp_path).is_ok


def test_both_writers_lay_out_the_same_region(freetoken: Any, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", many_tensors(), llama_config())
    ftw.convert(source, tmp_path / "ours", shard_limit=16384)
    (tmp_path / "theirs").mkdir()
    writer = freetoken.FTWWriter(str(tmp_path / "theirs"), shard_limit=16384)
    with ftw.load(source, device="cpu") as model:
        for name, tensor in model.weights():
            writer.add_tensor(name, tensor)
    writer.finalize({})
    shards = sorted(path.name for path in (tmp_path / "theirs").glob("*.ftw"))
    assert shards == sorted(path.name for path in (tmp_path / "ours").glob("*.ftw"))
    assert len(shards) > 5
    for shard in shards:
        assert (tmp_path / "ours" / shard).read_bytes() == (tmp_path / "theirs" / shard).read_bytes()
