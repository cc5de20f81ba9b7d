"""FTWs that FreeToken makes from a GGUF, by its own code out of the 0.2.1 wheel, and its readers on FTWs of ftw's.

The wheel's modules for GGUF and FTW are imported without its packages' own imports, which need a GPU's libraries.
"""

import importlib
import importlib.util
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFValueType, LlamaFileType
from gguf_builder import Blocks, random_blocks, write_gguf

import ftw
from ftw.checkpoint.config import ModelConfig
from ftw.ggml_types import PACKED_TYPES, ggml_types_by_name
from ftw.tensors import TensorInfo
from ftw.verdict.packing import find_packing

SPEC = importlib.util.find_spec("freetoken")
pytestmark = [
    pytest.mark.skipif(SPEC is None, reason="freetoken's wheel exists for x86-64 Linux alone"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable"),
]
ROWS, TABLE = 21, "model.embed_tokens.weight"
COPY = "source_metadata.gguf"


class FreeToken(NamedTuple):
    """FreeToken's modules."""

    ftw: Any
    reader: Any
    tensors: Any
    ggml_types: Any


@pytest.fixture(scope="module")
def freetoken() -> Iterator[FreeToken]:
    assert SPEC is not None
    assert SPEC.origin is not None
    root = Path(SPEC.origin).parent
    known = set(sys.modules)
    packages = ("checkpoint", "layers", "layers.quantization", "models", "models.gguf", "third_party")
    stand_ins: dict[str, dict[str, Any]] = {
        "freetoken": {"__path__": [str(root)]},
        "freetoken.utils": {"__path__": [], "init_logger": lambda *_, **__: logging.getLogger("freetoken")},
        "freetoken.utils.progress": {"byte_bar": lambda *_, **__: MagicMock()},
        **{f"freetoken.{name}": {"__path__": [str(root.joinpath(*name.split(".")))]} for name in packages},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, attributes in stand_ins.items():
            module = types.ModuleType(name)
            vars(module).update(attributes)
            patch.setitem(sys.modules, name, module)
        names = ("checkpoint.ftw", "models.gguf.reader", "models.gguf.tensors", "layers.quantization.ggml_types")
        yield FreeToken(*(importlib.import_module(f"freetoken.{name}") for name in names))
        for name in set(sys.modules) - known - set(stand_ins):
            if name.startswith("freetoken."):
                del sys.modules[name]


def columns_of(name: str) -> int:
    """Return a width that is no multiple of 512, so that FreeToken appends rows of zeros, of two blocks at least."""
    return max(2 * ggml_types_by_name()[name].block_size, 64) if ggml_types_by_name()[name].block_size < 256 else 768


def table_of(name: str) -> Blocks:
    return random_blocks(GGMLQuantizationType[name], ROWS, columns_of(name) // ggml_types_by_name()[name].block_size)


def write_source(
    folder: Path, name: str, *, head: bool = True, tokens: int = ROWS, file_type: LlamaFileType | None = None
) -> Path:
    """Write a GGUF whose table, and perhaps head, are of a type."""
    kvs: dict[str, Any] = {
        "llama.block_count": (GGUFValueType.UINT32, 1),
        "llama.embedding_length": (GGUFValueType.UINT32, columns_of(name)),
        "tokenizer.ggml.tokens": (GGUFValueType.ARRAY, [f"t{number}" for number in range(tokens)]),
    }
    if file_type is not None:
        kvs["general.file_type"] = (GGUFValueType.UINT32, int(file_type))
    tensors: dict[str, np.ndarray | Blocks] = {"token_embd.weight": table_of(name)}
    if head:
        tensors["output.weight"] = random_blocks(GGMLQuantizationType.Q8_0, ROWS, columns_of(name) // 32, seed=1)
    return write_gguf(folder / "source.gguf", tensors, kvs)


def convert_with_freetoken(freetoken: FreeToken, source: Path, folder: Path, *, leaf: str = "weight") -> Path:
    """Do what FreeToken's conversion of a llama does with the table, the head and the metadata."""
    index = freetoken.reader.gguf_tensor_index(str(source))
    writer = freetoken.ftw.FTWWriter(str(folder))
    for prefix, name in (("model.embed_tokens", "token_embd.weight"), ("lm_head", "output.weight")):
        if name in index:
            info = index[name]
            parts = freetoken.tensors.fused(prefix, [info], [freetoken.tensors.matrix(info)], info.ne[0])
            for found, tensor in parts:
                writer.add_tensor(found.removesuffix("weight") + leaf, tensor)
    writer.finalize({"fingerprint": "abc", "side_files": []})
    freetoken.reader.write_metadata_gguf(str(source), str(folder / COPY))
    return folder


def test_padding_is_what_freetoken_appends(freetoken: FreeToken) -> None:
    for columns in (32, 64, 96, 160, 192, 256, 480, 512, 544, 576, 640, 1024, 2560, 2880, 4096, 5120):
        padding = freetoken.ggml_types.pad_rows(int(GGMLQuantizationType.Q8_0), columns)
        shape = (1000 + padding, freetoken.ggml_types.row_bytes(int(GGMLQuantizationType.Q8_0), columns))
        found = find_packing(
            TensorInfo("t", "U8", shape, 0, 0), ModelConfig(is_gguf=True, hidden_size=columns, vocab_size=1000)
        )
        assert found == ("Q8_0", 1000, columns)


def unambiguous() -> list[str]:
    """Return the types that the bytes of a row tell."""
    sizes = {name: (columns_of(name), ggml_types_by_name()[name].row_nbytes(columns_of(name))) for name in PACKED_TYPES}
    return [
        name
        for name, (columns, nbytes) in sizes.items()
        if not any(
            other != name
            and columns % ggml_types_by_name()[other].block_size == 0
            and ggml_types_by_name()[other].row_nbytes(columns) == nbytes
            for other in PACKED_TYPES
        )
    ]


def assert_rows(source: Path, table: Blocks) -> None:
    ids = torch.arange(-1, ROWS + 12)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.dequantize(table.data, table.ggml_type))
    with ftw.load(source, embed="host", device="cpu", dtype=torch.float32) as model:
        found = model.embedding(ids)
        assert model.embedding.num_embeddings == ROWS
    assert torch.equal(found[1 : ROWS + 1].nan_to_num(), expected.nan_to_num())
    assert not found[ROWS + 1 :].count_nonzero()
    assert not found[0].count_nonzero()


def test_most_types_are_told_by_the_width() -> None:
    assert len(unambiguous()) > len(PACKED_TYPES) // 2


@pytest.mark.parametrize("leaf", ["weight", "qweight"], ids=["0.2.1", "0.1.2"])
@pytest.mark.parametrize("name", unambiguous())
def test_freetokens_ftw_is_looked_up(freetoken: FreeToken, tmp_path: Path, name: str, leaf: str) -> None:
    folder = convert_with_freetoken(freetoken, write_source(tmp_path, name), tmp_path / "out", leaf=leaf)
    report = ftw.inspect(folder)
    [table] = report.verdict.tables
    assert (table.name, table.dtype) == (f"model.embed_tokens.{leaf}", name)
    assert (table.rows, table.columns) == (ROWS, columns_of(name))
    assert (table.eligible, table.detail) == (True, f"untied: lm_head.{leaf} is stored")
    evidence = ("gguf:output_weight_present=true", f"tensor:lm_head.{leaf}")
    assert (report.verdict.tied, report.verdict.tie_evidence) == (False, evidence)
    with ftw.open_checkpoint(folder) as checkpoint:
        padding = freetoken.ggml_types.pad_rows(int(GGMLQuantizationType[name]), columns_of(name))
        assert padding
        assert checkpoint.tensors[table.name].shape == (ROWS + padding, table.row_bytes)
    assert_rows(folder, table_of(name))


AMBIGUOUS = {
    "Q4_0": LlamaFileType.MOSTLY_Q4_0, "IQ4_NL": LlamaFileType.MOSTLY_IQ4_NL, "Q4_K": LlamaFileType.MOSTLY_Q4_K_M,
    "Q5_K": LlamaFileType.MOSTLY_Q5_K_S, "IQ4_XS": LlamaFileType.MOSTLY_IQ4_XS, "Q3_K": LlamaFileType.MOSTLY_Q3_K_L,
    "IQ3_S": LlamaFileType.MOSTLY_IQ3_S,
}  # fmt: skip


@pytest.mark.parametrize(("name", "file_type"), AMBIGUOUS.items(), ids=AMBIGUOUS)
def test_type_that_the_file_type_settles_is_looked_up(
    freetoken: FreeToken, tmp_path: Path, name: str, file_type: LlamaFileType
) -> None:
    folder = convert_with_freetoken(freetoken, write_source(tmp_path, name, file_type=file_type), tmp_path / "out")
    assert ftw.inspect(folder).verdict.token_embedding.dtype == name
    assert_rows(folder, table_of(name))


@pytest.mark.parametrize("name", ["Q4_0", "IQ4_NL", "NVFP4"])
@pytest.mark.parametrize(
    ("file_type", "told"), [(None, "is missing"), (LlamaFileType.MOSTLY_Q6_K, "is Q6_K")], ids=["missing", "other"]
)
def test_type_that_nothing_settles_is_refused_with_what_is_missing(
    freetoken: FreeToken, tmp_path: Path, name: str, file_type: LlamaFileType | None, told: str
) -> None:
    folder = convert_with_freetoken(freetoken, write_source(tmp_path, name, file_type=file_type), tmp_path / "out")
    [table] = ftw.inspect(folder).verdict.tables
    columns, nbytes = columns_of(name), table_of(name).data.shape[1]
    candidates = "Q4_0 or IQ4_NL or NVFP4"
    assert (table.reason, table.eligible) == ("unsupported_encoding", False)
    assert table.detail == (
        f"its index records no ggml_type; rows of {nbytes} bytes for {columns} values may be {candidates}, "
        f"and general.file_type {told}; convert it with ftw"
    )
    with pytest.raises(ftw.NotEligibleError, match="may be Q4_0 or IQ4_NL or NVFP4"):
        ftw.load(folder, embed="host", device="cpu")


def test_tied_ftw_of_freetoken_stays(freetoken: FreeToken, tmp_path: Path) -> None:
    folder = convert_with_freetoken(freetoken, write_source(tmp_path, "Q8_0", head=False), tmp_path / "out")
    report = ftw.inspect(folder)
    assert report.verdict.token_embedding.reason == "tied"
    assert report.verdict.tie_evidence == ("gguf:output_weight_present=false", "no LM head stored")
    with ftw.load(folder, embed="auto", device="cpu") as model:
        assert (model.memory.placement, model.embedding.num_embeddings) == ("gpu", ROWS)


def test_plain_table_of_freetoken_is_bfloat16_without_padding(freetoken: FreeToken, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((ROWS, 64)).astype(np.float16)
    kvs = {"llama.embedding_length": (GGUFValueType.UINT32, 64)}
    source = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": values, "output.weight": values[::-1].copy()}, kvs)
    folder = convert_with_freetoken(freetoken, source, tmp_path / "out")
    [table] = ftw.inspect(folder).verdict.tables
    assert (table.eligible, table.dtype, table.rows, table.columns) == (True, "BF16", ROWS, 64)


def test_rows_that_the_token_list_does_not_explain_are_refused(freetoken: FreeToken, tmp_path: Path) -> None:
    folder = convert_with_freetoken(freetoken, write_source(tmp_path, "Q8_0", tokens=ROWS - 1), tmp_path / "out")
    [table] = ftw.inspect(folder).verdict.tables
    assert table.reason == "unsupported_encoding"
    assert table.detail == (
        "its index records no logical_shape: of its 28 rows 7 may be padding, and the metadata tell of 20 tokens"
    )


def test_ftw_made_anew_from_freetokens_keeps_its_bytes_and_its_verdict(freetoken: FreeToken, tmp_path: Path) -> None:
    folder = convert_with_freetoken(freetoken, write_source(tmp_path, "Q8_0"), tmp_path / "theirs")
    ftw.convert(folder, tmp_path / "ours", embed="host")
    assert ftw.verify(tmp_path / "ours", against=folder).is_ok
    assert (tmp_path / "ours" / COPY).read_bytes() == (folder / COPY).read_bytes()
    assert ftw.inspect(tmp_path / "ours").verdict == ftw.inspect(folder).verdict
    assert_rows(tmp_path / "ours", table_of("Q8_0"))


# FreeToken on what ftw wrote


@pytest.mark.parametrize("head", [True, False], ids=["untied", "tied"])
def test_both_write_the_same_copy_of_the_metadata(freetoken: FreeToken, tmp_path: Path, head: bool) -> None:
    source = write_source(tmp_path, "Q6_K", head=head)
    ftw.convert(source, tmp_path / "out")
    freetoken.reader.write_metadata_gguf(str(source), str(tmp_path / "theirs.gguf"))
    assert (tmp_path / "out" / COPY).read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


def test_freetoken_reads_the_ftw_that_ftw_made(freetoken: FreeToken, tmp_path: Path) -> None:
    source = write_source(tmp_path, "Q5_1")
    ftw.convert(source, tmp_path / "out", embed="host", shard_limit=4096)
    out = str(tmp_path / "out")
    assert freetoken.ftw.is_ftw_checkpoint(out)
    found = {name: tensor.clone() for name, tensor in freetoken.ftw.iter_ftw_weights(out)}
    assert set(found) == {"token_embd.weight", "output.weight"}
    assert found["token_embd.weight"].dtype == torch.uint8
    assert found["token_embd.weight"].numpy().tobytes() == table_of("Q5_1").data.tobytes()
    copy = freetoken.reader.gguf_config_source(out)
    assert copy == str(tmp_path / "out" / COPY)
    assert freetoken.reader.gguf_architecture(copy) == "llama"
    metadata = freetoken.reader.load_gguf_metadata(copy)
    assert metadata["freetoken.output_weight_present"] is True
    assert metadata["tokenizer.ggml.tokens"] == [f"t{number}" for number in range(ROWS)]
