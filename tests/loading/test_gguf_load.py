"""Loading GGUF models, and FTWs made from them, on the CPU: rows, dtypes, packed weights, padding."""

import json
import logging
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from builders import write_ftw
from gguf import GGMLQuantizationType, GGUFValueType
from gguf_builder import Blocks, write_gguf

import ftw

TABLE, HEAD = "token_embd.weight", "output.weight"
ROWS, COLUMNS = 10, 64
IDS = torch.tensor([[0, 9, 3], [10, -1, 3]])
KVS = {
    "llama.block_count": (GGUFValueType.UINT32, 1),
    "llama.embedding_length": (GGUFValueType.UINT32, COLUMNS),
    "tokenizer.ggml.tokens": (GGUFValueType.ARRAY, [f"t{number}" for number in range(ROWS)]),
}


def quantized(name: str = "Q8_0", rows: int = ROWS, seed: int = 0) -> Blocks:
    values = np.random.default_rng(seed).standard_normal((rows, COLUMNS)).astype(np.float32)
    return Blocks(gguf.quantize(values, GGMLQuantizationType[name]), GGMLQuantizationType[name])


def values_of(blocks: Blocks, ids: torch.Tensor = IDS) -> torch.Tensor:
    """Return the rows of ids in float32 as the gguf package decodes them, zeros for ids outside."""
    table = torch.from_numpy(gguf.dequantize(blocks.data, blocks.ggml_type))
    found = table[ids.clamp(0, len(table) - 1)]
    return found.where(((ids >= 0) & (ids < len(table)))[..., None], 0)


def write_model(folder: Path, *, head: bool = True) -> Path:
    tensors: dict[str, np.ndarray | Blocks] = {
        TABLE: quantized("Q4_0"), "output_norm.weight": np.ones(COLUMNS, np.float32),
        "blk.0.ffn_up_exps.weight": Blocks(np.stack([quantized().data] * 3), GGMLQuantizationType.Q8_0),
    }  # fmt: skip
    if head:
        tensors[HEAD] = quantized("Q5_1", seed=1)
    return write_gguf(folder / "m.gguf", tensors, KVS)


@pytest.fixture(params=["gguf", "ftw"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the same untied model in both formats."""
    path = write_model(tmp_path)
    if request.param == "gguf":
        return path
    ftw.convert(path, tmp_path / "out", embed="host")
    path.unlink()
    return tmp_path / "out"


@pytest.fixture(params=["gguf", "ftw"])
def tied(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = write_model(tmp_path, head=False)
    if request.param == "gguf":
        return path
    ftw.convert(path, tmp_path / "out")
    path.unlink()
    return tmp_path / "out"


@pytest.mark.parametrize("embed", ["host", "auto", "gpu"])
def test_rows_are_bfloat16_unless_told_otherwise(source: Path, embed: str) -> None:
    with ftw.load(source, embed=embed, device="cpu") as model:
        found = model.embedding(IDS)
        assert (found.dtype, found.shape) == (torch.bfloat16, (2, 3, COLUMNS))
        assert torch.equal(found, values_of(quantized("Q4_0")).to(torch.bfloat16))
        assert (model.embedding.num_embeddings, model.embedding.embedding_dim) == (ROWS, COLUMNS)
        assert (model.embedding.ggml_type, model.embedding.name) == ("Q4_0", TABLE)
        assert model.embedding.placement == model.memory.placement == ("gpu" if embed == "gpu" else "host")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_dtype_is_that_of_lookups(source: Path, dtype: torch.dtype) -> None:
    with ftw.load(source, embed="host", device="cpu", dtype=dtype) as model:
        found = model.embedding(IDS.to(torch.int32))
        assert torch.equal(found, values_of(quantized("Q4_0")).to(dtype))
        assert found.dtype == dtype


def test_weights_are_packed_and_the_model_tells_how(source: Path) -> None:
    with ftw.load(source, embed="host", device="cpu") as model:
        weights = dict(model.weights())
        kinds = {name: (model.tensors[name].ggml_type, model.tensors[name].logical_shape) for name in weights}
    assert set(weights) == {HEAD, "output_norm.weight", "blk.0.ffn_up_exps.weight"}
    assert kinds == {
        HEAD: ("Q5_1", (ROWS, COLUMNS)),
        "output_norm.weight": (None, None),
        "blk.0.ffn_up_exps.weight": ("Q8_0", (3, ROWS, COLUMNS)),
    }
    assert (weights[HEAD].dtype, tuple(weights[HEAD].shape)) == (torch.uint8, (ROWS, 48))
    assert weights[HEAD].numpy().tobytes() == quantized("Q5_1", seed=1).data.tobytes()
    assert tuple(weights["blk.0.ffn_up_exps.weight"].shape) == (3, ROWS, 68)
    assert torch.equal(weights["output_norm.weight"], torch.ones(COLUMNS))


def test_model_has_the_config_of_the_metadata(source: Path) -> None:
    with ftw.load(source, device="cpu") as model:
        assert (model.config.architecture, model.config.hidden_size, model.config.vocab_size) == ("llama", 64, 10)


def test_table_that_stays_is_the_tensor_that_weights_yields(source: Path) -> None:
    with ftw.load(source, device="cpu") as model:
        table = model.embedding.table
        weights = dict(model.weights())
        assert weights[TABLE].data_ptr() == table.data_ptr()
        assert (table.dtype, tuple(table.shape)) == (torch.uint8, (ROWS, 36))
        assert (model.tables, model.memory.total_pinned_bytes) == ({}, 0)


def test_tied_table_is_looked_up_where_it_stays(tied: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ftw"), ftw.load(tied, embed="auto", device="cpu") as model:
        assert torch.equal(model.embedding(IDS), values_of(quantized("Q4_0")).to(torch.bfloat16))
        assert TABLE in dict(model.weights())
        reason = "tied to the LM head: llama has one, and none is stored"
        assert (model.memory.placement, model.memory.reason) == ("gpu", reason)
    assert caplog.messages == [f"{tied}: the token embedding stays on the GPU: {reason}"]


def test_tied_table_is_refused_for_the_host(tied: Path) -> None:
    with pytest.raises(ftw.NotEligibleError) as caught:
        ftw.load(tied, embed="host", device="cpu")
    assert str(caught.value) == (
        f"{tied}: token_embd.weight: refused: the LM head uses this same table (llama has one, and none is "
        "stored); use embed='gpu' or 'auto'"
    )


def test_memory_report_counts_the_packed_bytes(source: Path) -> None:
    with ftw.load(source, embed="host", device="cpu") as model:
        assert model.memory.pinned_bytes == {TABLE: ROWS * 36}


def test_per_layer_table_is_on_the_host_while_the_token_embedding_stays(tmp_path: Path) -> None:
    name = "per_layer_token_embd.weight"
    path = write_gguf(tmp_path / "m.gguf", {TABLE: quantized(), name: quantized("Q5_0", seed=2)}, KVS)
    with ftw.load(path, embed="auto", device="cpu") as model:
        assert (list(model.tables), model.memory.placement) == ([name], "gpu")
        assert torch.equal(model.tables[name](IDS), values_of(quantized("Q5_0", seed=2)).to(torch.bfloat16))
        assert torch.equal(model.embedding(IDS), values_of(quantized()).to(torch.bfloat16))
        assert list(dict(model.weights())) == [TABLE]


@pytest.mark.parametrize("head", [True, False], ids=["untied", "tied"])
def test_table_without_a_decoder_streams_but_is_not_looked_up(tmp_path: Path, head: bool) -> None:
    table = Blocks(np.zeros((ROWS, 80), np.uint8), GGMLQuantizationType.Q8_1)
    path = write_gguf(tmp_path / "m.gguf", {TABLE: table, **({HEAD: quantized()} if head else {})}, KVS)
    with ftw.load(path, embed="auto", device="cpu") as model:
        assert tuple(dict(model.weights())[TABLE].shape) == (ROWS, 80)
        with pytest.raises(ftw.NotEligibleError, match="its rows are packed as Q8_1, which no lookup unpacks"):
            _ = model.embedding


@pytest.mark.parametrize("embed", ["host", "gpu"])
@pytest.mark.parametrize("leaf", ["weight", "qweight"])
def test_padding_rows_of_freetokens_ftw_give_zeros(tmp_path: Path, leaf: str, embed: str) -> None:
    """Seven rows follow ten of 64 values; here they are not even zeros, and are outside of the table all the same."""
    name = f"model.embed_tokens.{leaf}"
    packed = np.concatenate([quantized().data, quantized(rows=7, seed=3).data])
    tensors = {name: torch.from_numpy(packed), "lm_head.weight": torch.from_numpy(packed.copy())}
    write_ftw(tmp_path, tensors)
    write_gguf(tmp_path / "source_metadata.gguf", {}, KVS)
    ids = torch.arange(-1, 19)
    with ftw.load(tmp_path, embed=embed, device="cpu") as model:
        assert (model.embedding.num_embeddings, model.embedding.name) == (ROWS, name)
        assert torch.equal(model.embedding(ids), values_of(quantized(), ids).to(torch.bfloat16))
        weights = dict(model.weights())
    assert (name in weights) == (embed == "gpu")
    if embed == "gpu":
        assert torch.equal(weights[name], tensors[name])


@pytest.mark.oracle("gguf", "0.19")
def test_unsettled_type_of_freetokens_ftw_is_refused_by_name(tmp_path: Path) -> None:
    rows = torch.zeros(17, 36, dtype=torch.uint8)
    write_ftw(tmp_path, {"model.embed_tokens.weight": rows, "lm_head.weight": rows})
    write_gguf(tmp_path / "source_metadata.gguf", {}, KVS)
    with ftw.load(tmp_path, embed="auto", device="cpu") as model:
        assert set(dict(model.weights())) == {"model.embed_tokens.weight", "lm_head.weight"}
        with pytest.raises(ftw.NotEligibleError) as caught:
            _ = model.embedding
    assert "rows of 36 bytes for 64 values may be Q4_0 or IQ4_NL or NVFP4" in str(caught.value)
    assert "general.file_type is missing" in str(caught.value)


def test_load_of_the_ftw_needs_nothing_else(tmp_path: Path) -> None:
    ftw.convert(write_model(tmp_path), tmp_path / "out", embed="host")
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["freetoken-00000.ftw", "freetoken_weight.json", "source_metadata.gguf"]
    entry = json.loads((tmp_path / "out" / "freetoken_weight.json").read_text())["tensors"][0]
    assert (entry["name"], entry["role"], entry["placement"]) == (TABLE, "token_embedding", "host")
    (tmp_path / "m.gguf").unlink()
    (tmp_path / "out").rename(tmp_path / "moved")
    with ftw.load(tmp_path / "moved", embed="host", device="cpu") as model:
        assert torch.equal(model.embedding(IDS), values_of(quantized("Q4_0")).to(torch.bfloat16))


def test_closed_model_raises(source: Path) -> None:
    model = ftw.load(source, embed="host", device="cpu")
    embedding, weights = model.embedding, model.weights()
    next(weights)
    model.close()
    with pytest.raises(ftw.ClosedError):
        embedding(IDS)
    with pytest.raises(ftw.ClosedError):
        next(weights)
    with pytest.raises(ftw.ClosedError):
        _ = model.embedding
    model.close()
