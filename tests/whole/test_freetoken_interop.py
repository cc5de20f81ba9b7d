"""FreeToken's own reader and writer, out of its 0.2.1 wheel: they read what ftw writes and write what ftw reads.

The wheel's one module for the format is loaded alone, with a logger and a progress bar in place of the rest of its
package, which needs a GPU's libraries.
"""

import importlib.util
import json
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint, write_ftw
from df11_builders import read_fixture, write_df11
from gguf import GGMLQuantizationType, GGUFValueType
from gguf_builder import random_blocks, write_gguf
from places import DATA

import ftw
from ftw.dtypes import BY_TORCH_NAME

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


def assert_freetoken_reads(freetoken: Any, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Check that FreeToken's reader finds these tensors and no others, with their dtypes, shapes and bits."""
    assert freetoken.is_ftw_checkpoint(str(folder))
    kinds = ("weight", "experts_bank")
    assert set(freetoken.ftw_tensor_names(str(folder), *kinds)) == set(tensors)
    seen = {name: tensor.clone() for name, tensor in freetoken.iter_ftw_weights(str(folder), kinds=kinds)}
    assert set(seen) == set(tensors)
    for name, tensor in tensors.items():
        assert (seen[name].dtype, seen[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(as_bits(seen[name]), as_bits(tensor)), name


def index_of(folder: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((folder / "freetoken_weight.json").read_text())
    return index


@pytest.mark.parametrize("shard_limit", [4096, 16384, 1 << 20], ids=["4KiB", "16KiB", "1MiB"])
@pytest.mark.parametrize("embed", ["host", "gpu"])
def test_freetoken_reads_what_ftw_writes(freetoken: Any, tmp_path: Path, embed: str, shard_limit: int) -> None:
    tensors = many_tensors()
    source = write_checkpoint(tmp_path / "source", tensors, llama_config())
    ftw.convert(source, tmp_path / "out", embed=embed, shard_limit=shard_limit)
    first = index_of(tmp_path / "out")["tensors"][0]
    assert (first["name"] == "model.embed_tokens.weight" and "placement" in first) == (embed == "host")
    assert_freetoken_reads(freetoken, tmp_path / "out", tensors)


TORCH_HAS = sorted(name for name in BY_TORCH_NAME if hasattr(torch, name))


@pytest.mark.parametrize("dtype", TORCH_HAS)
def test_freetoken_reads_every_dtype(freetoken: Any, tmp_path: Path, dtype: str) -> None:
    content = torch.randint(0, 2 if dtype == "bool" else 256, (8 * 625,), generator=torch.Generator().manual_seed(0))
    values = content.to(torch.uint8).view(getattr(torch, dtype))
    tensors = {"long": values, "square": values[:24].reshape(2, 3, 4), "scalar": values[0]}
    if BY_TORCH_NAME[dtype].torch_elements > 1:
        del tensors["scalar"]
    ftw.convert(write_ftw(tmp_path / "source", tensors), tmp_path / "out", shard_limit=4096)
    assert len(index_of(tmp_path / "out")["shards"]) >= 3
    assert_freetoken_reads(freetoken, tmp_path / "out", tensors)


def test_freetoken_reads_an_ftw_made_from_a_gguf(freetoken: Any, tmp_path: Path) -> None:
    blocks = {
        "token_embd.weight": random_blocks(GGMLQuantizationType.Q4_0, 300, 2),
        "output.weight": random_blocks(GGMLQuantizationType.Q8_0, 300, 2, seed=1),
    }
    norm = np.arange(64, dtype=np.float32)
    kvs = {"llama.block_count": (GGUFValueType.UINT32, 1), "llama.embedding_length": (GGUFValueType.UINT32, 64)}
    source = write_gguf(tmp_path / "m.gguf", {**blocks, "output_norm.weight": norm}, kvs)
    ftw.convert(source, tmp_path / "out", embed="host", shard_limit=8192)
    assert (tmp_path / "out" / "source_metadata.gguf").is_file()
    table = index_of(tmp_path / "out")["tensors"][0]
    assert (table["ggml_type"], table["logical_shape"], table["placement"]) == ("Q4_0", [300, 64], "host")
    packed = {name: torch.from_numpy(block.data.copy()) for name, block in blocks.items()}
    assert_freetoken_reads(freetoken, tmp_path / "out", {**packed, "output_norm.weight": torch.from_numpy(norm)})


def test_freetoken_reads_an_ftw_with_decoded_tables_and_files_left_out(freetoken: Any, tmp_path: Path) -> None:
    parts, known = read_fixture("normal")
    rows, columns = int(known["rows"]), int(known["columns"])
    rest = {"model.norm.weight": torch.ones(8), "lm_head.weight": torch.ones(rows, columns, dtype=torch.bfloat16)}
    source = write_df11(tmp_path / "source", parts, (rows, columns), rest)
    (source / "optimizer.bin").write_bytes(b"no weights of ours")
    ftw.convert(source, tmp_path / "out", embed="host", decode_df11=True, shard_limit=16384)
    own = index_of(tmp_path / "out")["ftw"]
    assert [entry["name"] for entry in own["decoded"]] == ["model.embed_tokens.weight"]
    assert "optimizer.bin" in [entry["name"] for entry in own["left_out"]]
    with ftw.open_checkpoint(source, decode_df11=True) as checkpoint:
        table = bytearray(checkpoint.tensors["model.embed_tokens.weight"].nbytes)
        checkpoint.read_into("model.embed_tokens.weight", table)
    plain = torch.frombuffer(table, dtype=torch.bfloat16).view(rows, columns)
    assert_freetoken_reads(freetoken, tmp_path / "out", {**rest, "model.embed_tokens.weight": plain})


def test_freetoken_fails_on_tensors_without_elements_and_reads_the_others(freetoken: Any, tmp_path: Path) -> None:
    """It maps 0 bytes of memory, of its own FTWs too; `keep` gets it past them."""
    tensors = {**llama_tensors(), "empty": torch.ones(0, 8)}
    ftw.convert(write_checkpoint(tmp_path / "source", tensors, llama_config()), tmp_path / "out")
    out = str(tmp_path / "out")
    with pytest.raises(OSError, match="Invalid argument"):
        list(freetoken.iter_ftw_weights(out))
    seen = {name: tensor.clone() for name, tensor in freetoken.iter_ftw_weights(out, keep=lambda name: name != "empty")}
    assert set(seen) == set(llama_tensors())
    assert all(torch.equal(seen[name], tensor) for name, tensor in llama_tensors().items())


@pytest.mark.parametrize("shard_limit", [4096, 1 << 20], ids=["4KiB", "1MiB"])
@pytest.mark.parametrize("kind", ["plain", "banks-flat", "banks-layer", "gguf"])
def test_freetoken_reads_its_own_ftw_that_ftw_made_anew(
    freetoken: Any, tmp_path: Path, kind: str, shard_limit: int
) -> None:
    source = DATA / "freetoken-0.2.1" / kind
    ftw.convert(source, tmp_path / "out", embed="auto", shard_limit=shard_limit)
    kinds = ("weight", "experts_bank")
    theirs = {name: tensor.clone() for name, tensor in freetoken.iter_ftw_weights(str(source), kinds=kinds)}
    with ftw.open_checkpoint(source) as checkpoint:
        beside = [name for name, tensor in checkpoint.tensors.items() if tensor.shard]
    with ftw.load(source, device="cpu") as model:
        side_files = {name: tensor for name, tensor in model.weights() if name in beside}
    assert_freetoken_reads(freetoken, tmp_path / "out", {**theirs, **side_files})
    assert freetoken.ftw_quant_format(str(tmp_path / "out")) == freetoken.ftw_quant_format(str(source))
    reader = freetoken.FTWReader(str(tmp_path / "out"))
    split = freetoken._split_bank_entries(reader, str(source), 4)
    assert (split is None) == (not kind.startswith("banks"))
    if split is not None:
        assert {entry["name"] for entry in split[1]} <= {"gate_up_alpha", "down_alpha"}
        assert bool(split[2]) == (kind == "banks-flat")
        assert bool(split[3]) == (kind == "banks-layer")
    reader.close()


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
