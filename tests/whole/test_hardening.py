"""What reviewers found in checkpoints, verdicts and the FTWs made from them, each kept as it was reproduced."""

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint, write_ftw
from ftw.cli.main import main
from gguf import GGMLQuantizationType, GGUFEndian, GGUFValueType, quants
from gguf_builder import Blocks, write_gguf

import ftw
from ftw.checkpoint.config import parse_model_config
from ftw.lookup.embedding import HostEmbedding
from ftw.readers.gguf.metadata import MAX_ARRAYS, MAX_STRINGS, MetadataArray

WIDTH, ROWS = 64, 40


def packed(name: str = "Q8_0", seed: int = 0) -> Blocks:
    values = np.random.default_rng(seed).standard_normal((ROWS, WIDTH)).astype(np.float32)
    kind = GGMLQuantizationType[name]
    return Blocks(quants.quantize(values, kind), kind)


def source(folder: Path, **others: Any) -> Path:
    tensors = {"token_embd.weight": packed(), "output.weight": packed(seed=1), **others}
    return write_gguf(folder / "m.gguf", tensors, {"llama.embedding_length": (GGUFValueType.UINT32, WIDTH)})


def edit_table(folder: Path, **changes: Any) -> None:
    path = folder / "freetoken_weight.json"
    index = json.loads(path.read_text())
    entry = next(entry for entry in index["tensors"] if entry["name"] == "token_embd.weight")
    entry.update(changes)
    path.write_text(json.dumps({**index}))


@pytest.fixture
def made(tmp_path: Path) -> Path:
    ftw.convert(source(tmp_path), tmp_path / "ftw", embed="host")
    return tmp_path / "ftw"


@pytest.mark.parametrize("kind", ["changed", "missing", "another"])
def test_copy_of_the_metadata_that_the_index_does_not_know_is_refused(made: Path, tmp_path: Path, kind: str) -> None:
    copy = made / "source_metadata.gguf"
    if kind == "missing":
        copy.unlink()
    elif kind == "changed":
        copy.write_bytes(copy.read_bytes()[:-1] + b"\0")
    else:
        copy.write_bytes(write_gguf(tmp_path / "bert.gguf", {}, {}).read_bytes())
    for function in (ftw.inspect, ftw.verify):
        with pytest.raises(
            ftw.CheckpointError, match=r"source_metadata\.gguf: file: (is missing|checksum is|is 96 bytes long)"
        ):
            function(made)


def test_ftw_made_anew_records_the_copy_again(made: Path, tmp_path: Path) -> None:
    ftw.convert(made, tmp_path / "again", embed="host")
    assert (tmp_path / "again" / "source_metadata.gguf").read_bytes() == (made / "source_metadata.gguf").read_bytes()
    (tmp_path / "again" / "source_metadata.gguf").unlink()
    with pytest.raises(ftw.CheckpointError, match="is missing"):
        ftw.inspect(tmp_path / "again")


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"logical_shape": [0, WIDTH]}, "which has no rows"),
        ({"ggml_type": None, "logical_shape": None, "dtype": "int8"}, "embedding_length is 64"),
        (
            {"ggml_type": None, "logical_shape": None, "dtype": "bfloat16", "shape": [ROWS, 34]},
            "embedding_length is 64",
        ),
    ],
    ids=["no-rows", "int8", "bfloat16"],
)
def test_table_that_the_index_lies_about_is_not_looked_up(made: Path, changes: dict[str, Any], detail: str) -> None:
    edit_table(made, **changes)
    table = ftw.inspect(made).verdict.token_embedding
    assert (table.eligible, table.reason) == (False, "unsupported_encoding")
    assert detail in table.detail


@pytest.mark.parametrize(
    ("logical_shape", "is_eligible"),
    [([64, 8], True), ([40, 8], True), ([32, 16], False), ([65, 8], False), ([0, 8], False), ([64], False)],
    ids=str,
)
def test_logical_shape_of_a_plain_table_may_only_leave_out_rows(
    tmp_path: Path, logical_shape: list[int], is_eligible: bool
) -> None:
    folder = write_ftw(tmp_path, llama_tensors())
    (folder / "config.json").write_text(json.dumps(llama_config()))
    index = json.loads((folder / "freetoken_weight.json").read_text())
    index["tensors"][0]["logical_shape"] = logical_shape
    (folder / "freetoken_weight.json").write_text(json.dumps(index))
    table = ftw.inspect(folder).verdict.token_embedding
    assert table.eligible == is_eligible
    if not is_eligible:
        assert table.reason == "unsupported_encoding"
        assert f"its logical_shape is {logical_shape}" in table.detail
        with pytest.raises(ftw.NotEligibleError), ftw.load(folder, device="cpu") as model:
            model.embedding(torch.tensor([0]))


NGRAM = [f"ple_ngram_embd.{number}.weight" for number in range(2)]


def test_all_shards_of_a_packed_table_are_looked_up(tmp_path: Path) -> None:
    shards = [packed(seed=2), Blocks(packed(seed=3).data[:7], packed().ggml_type)]
    path = source(tmp_path, **dict(zip(NGRAM, shards, strict=True)))
    ftw.convert(path, tmp_path / "out", embed="host")
    wanted = quants.dequantize(np.concatenate([shard.data for shard in shards]), GGMLQuantizationType.Q8_0)
    for checkpoint in (path, tmp_path / "out"):
        with ftw.load(checkpoint, embed="host", device="cpu", dtype=torch.float32) as model:
            assert torch.equal(model.tables["ple_ngram_embd"](torch.arange(ROWS + 7)), torch.from_numpy(wanted))


def test_shards_of_other_types_are_no_table(tmp_path: Path) -> None:
    others = [Blocks(packed("Q4_0").data, GGMLQuantizationType[name]) for name in ("Q4_0", "IQ4_NL")]  # of equal width
    tables = ftw.inspect(source(tmp_path, **dict(zip(NGRAM, others, strict=True)))).verdict.tables
    assert (tables[1].name, tables[1].reason) == ("ple_ngram_embd", "unsupported_encoding")
    assert "its shards have different dtypes or widths" in tables[1].detail


@pytest.mark.parametrize(
    ("place", "rows", "is_eligible"), [(0, ROWS - 1, False), (1, ROWS - 1, True)], ids=["first", "last"]
)
def test_rows_of_padding_are_allowed_after_the_last_shard_alone(
    tmp_path: Path, place: int, rows: int, is_eligible: bool
) -> None:
    ftw.convert(source(tmp_path, **{name: packed(seed=2) for name in NGRAM}), tmp_path / "out")
    path = tmp_path / "out" / "freetoken_weight.json"
    index = json.loads(path.read_text())
    next(entry for entry in index["tensors"] if entry["name"] == NGRAM[place])["logical_shape"] = [rows, WIDTH]
    path.write_text(json.dumps(index))
    table = ftw.inspect(tmp_path / "out").verdict.tables[1]
    assert table.eligible == is_eligible
    assert not is_eligible or table.rows == ROWS + rows


@pytest.mark.parametrize("shape", [[5, 4], [7, 4], [7, 2], [24, 64]], ids=str)
def test_plain_shard_is_as_large_as_the_index_says(tmp_path: Path, shape: list[int]) -> None:
    shards = {f"model.engram.embed.shard_{number}.weight": torch.ones(rows, 4) for number, rows in enumerate((5, 7))}
    folder = write_ftw(tmp_path, {**llama_tensors(), **shards})
    (folder / "config.json").write_text(json.dumps(llama_config()))
    index = json.loads((folder / "freetoken_weight.json").read_text())
    index["tensors"][-1]["logical_shape"] = shape
    (folder / "freetoken_weight.json").write_text(json.dumps(index))
    table = ftw.inspect(folder).verdict.tables[1]
    assert (table.name, table.eligible) == ("model.engram.embed", shape == [7, 4])


@pytest.mark.parametrize("shape", [(3, WIDTH), (WIDTH,), (0, WIDTH)], ids=str)
def test_output_weight_that_can_be_no_head_is_none(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = source(tmp_path, **{"output.weight": np.ones(shape, np.float32)})
    ftw.convert(path, tmp_path / "out")
    for checkpoint in (path, tmp_path / "out"):
        table = ftw.inspect(checkpoint).verdict.token_embedding
        assert (table.eligible, table.reason) == (False, "tied")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("head.weight", (2, 8)), ("lm_head.weight", (1, 8)), ("lm_head.weight", (0, 8)), ("lm_head.weight", (8,)),
        ("audio.lm_head.weight", (64, 8)), ("mtp_head.lm_head.weight", (64, 8)),
        ("medusa_head.0.lm_head.weight", (64, 8)), ("lm_head.lora_A.weight", (4, 8)),
    ],
    ids=str,
)  # fmt: skip
def test_what_can_be_no_head_unties_nothing(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    tensors = {**llama_tensors(head=False), name: torch.ones(shape)}
    table = ftw.inspect(write_checkpoint(tmp_path, tensors, llama_config())).verdict.token_embedding
    assert (table.eligible, table.reason) == (False, "tied")


@pytest.mark.parametrize(
    "suffix",
    ["weight.scaling", "lora_embedding_A", "lora_embedding_B.default", "weight_amax", "additional_embedding.weight"],
    ids=str,
)
def test_what_lies_beside_a_table_and_is_not_known_is_named(tmp_path: Path, suffix: str) -> None:
    tensors = {**llama_tensors(), f"model.embed_tokens.{suffix}": torch.ones(4)}
    table = ftw.inspect(write_checkpoint(tmp_path, tensors, llama_config())).verdict.token_embedding
    assert (table.eligible, table.reason) == (False, "unsupported_encoding")
    assert suffix in table.detail


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("is_turned", [False, True], ids=["left-little", "turned"])
def test_scales_that_are_all_alike_tell_the_byte_order(tmp_path: Path, name: str, is_turned: bool) -> None:
    values = np.random.default_rng(0).integers(-1, 2, (ROWS, WIDTH)).astype(np.float32)
    values[:, ::32] = 1
    blocks = quants.quantize(values, GGMLQuantizationType[name])
    stored = blocks.reshape(-1, blocks.shape[1] // 2).copy()
    if is_turned:
        stored[:, :2] = stored[:, 1::-1]
    table = Blocks(stored.reshape(blocks.shape), GGMLQuantizationType[name])
    path = write_gguf(
        tmp_path / "m.gguf", {"token_embd.weight": table, "output.weight": np.ones((ROWS, WIDTH), np.float32)},
        order=GGUFEndian.BIG,
    )  # fmt: skip
    with ftw.load(path, embed="host", device="cpu", dtype=torch.float32) as model:
        found = model.embedding(torch.arange(ROWS))
    assert model.verdict.warnings == ()
    assert torch.equal(found, torch.from_numpy(quants.dequantize(blocks, GGMLQuantizationType[name])))


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.empty.weight"])
def test_empty_tensor_of_a_big_endian_file_is_read(tmp_path: Path, name: str) -> None:
    tensors = {name: np.empty((0, WIDTH), np.float16), "output.weight": np.empty((0, WIDTH), np.float16)}
    path = write_gguf(tmp_path / "m.gguf", tensors, order=GGUFEndian.BIG)
    assert not ftw.inspect(path).is_host_eligible
    with ftw.open_checkpoint(path) as checkpoint:
        checkpoint.read_into(name, bytearray())
    ftw.convert(path, tmp_path / "out")


def test_names_of_safetensors_mean_nothing_in_a_gguf(tmp_path: Path) -> None:
    path = source(tmp_path, **{"model.embed_tokens.weight": np.ones((ROWS, WIDTH), np.float32)})
    assert [table.name for table in ftw.inspect(path).verdict.tables] == ["token_embd.weight"]


def test_names_of_safetensors_mean_nothing_in_an_ftw_of_a_gguf(tmp_path: Path) -> None:
    path = source(tmp_path, **{"model.embed_tokens.weight": np.ones((ROWS, WIDTH), np.float32)})
    ftw.convert(path, tmp_path / "out", embed="host")
    assert [table.name for table in ftw.inspect(tmp_path / "out").verdict.tables] == ["token_embd.weight"]


@pytest.mark.parametrize(("element", "most"), [(8, MAX_STRINGS), (9, MAX_ARRAYS)], ids=["strings", "arrays"])
def test_array_that_would_take_minutes_to_pass_over_is_refused(tmp_path: Path, element: int, most: int) -> None:
    key = struct.pack("<Q1sIIQ", 1, b"k", 9, element, most + 1)
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key)
    with path.open("r+b") as file:
        file.truncate(16 * most)  # a hole
    with pytest.raises(ftw.CheckpointError, match=f"at most {most} are allowed"):
        ftw.inspect(path)


def test_long_name_of_an_architecture_takes_no_time(tmp_path: Path) -> None:
    config = llama_config(architectures=["x" + "For" * 1_000_000])
    report = ftw.inspect(write_checkpoint(tmp_path, llama_tensors(head=False), config))
    assert not report.is_host_eligible


@pytest.mark.timeout(120)  # it takes milliseconds, or half an hour
def test_endless_name_of_a_class_takes_no_time(tmp_path: Path) -> None:
    config = llama_config(architectures=["CausalLM" * 400_000 + "\n"])
    assert ftw.inspect(write_checkpoint(tmp_path, llama_tensors(), config)).is_host_eligible


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [({"hybrid_override_pattern": "*" * 20_000_000}, 2), ({"layer_types": ["attention"] * 2_000_000}, None)],
    ids=["pattern", "types"],
)
def test_layers_are_counted_in_little_memory(overrides: dict[str, Any], expected: int | None) -> None:
    config = llama_config(**overrides)
    tracemalloc.start()
    try:
        assert parse_model_config(config, Path("config.json")).num_attention_layers == expected
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_counts_of_layers_that_are_texts_or_arrays_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = (GGUFValueType.ARRAY, ["x" * 100] * 3)
    kvs = {"llama.block_count": (GGUFValueType.UINT32, 3), "llama.attention.head_count": texts}
    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": packed()}, kvs)
    monkeypatch.setattr(MetadataArray, "read", lambda _: pytest.fail("it was read"))
    assert ftw.inspect(path).config.kv_elements_per_token is None


def test_names_in_reasons_are_printable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = {"model.embed_tokens.weight": torch.ones(24, 8), "b\x1b[31m.lm_head.weight": torch.zeros(24, 8)}
    path = write_checkpoint(tmp_path, tensors, llama_config(tie_word_embeddings=True))
    with pytest.raises(ftw.NotEligibleError, match=r"b\\x1b\[31m\.lm_head\.weight") as caught:
        ftw.load(path, embed="host", device="cpu")
    assert str(caught.value).isprintable()
    ftw.load(path, embed="auto", device="cpu").close()
    assert caplog.messages
    assert all(message.isprintable() for message in caplog.messages)


def test_empty_target_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ftw.OutputError, match="target: is empty"):
        ftw.convert(source(tmp_path), "", overwrite=True)


def test_slip_in_a_path_is_not_sent_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert main(["inspect", "models/absent.gguf"]) == 1
    assert capsys.readouterr().err.startswith("ftw: error: models/absent.gguf: path: does not exist")


def test_columns_of_a_type_without_a_decoder_are_elements(tmp_path: Path) -> None:
    row = np.zeros((ROWS, WIDTH // 32 * 40), np.uint8)
    table = ftw.inspect(source(tmp_path, **{"token_embd.weight": Blocks(row, GGMLQuantizationType.Q8_1)}))
    assert table.verdict.token_embedding.columns == WIDTH


@pytest.mark.parametrize(
    ("table", "options"),
    [(torch.zeros(4), {}), (torch.zeros(4, 4), {"dtype": "float32"}), (torch.zeros(4, 4), {"dtype": torch.int8})],
    ids=["no-matrix", "text", "integers"],
)
def test_embedding_refuses_what_it_cannot_be(table: torch.Tensor, options: dict[str, Any]) -> None:
    with pytest.raises(ftw.LookupArgumentError, match="is needed"):
        HostEmbedding(table, **options)


@pytest.mark.parametrize("suffix", ["s", "norm", "gamma", "anything.else"], ids=str)
def test_fp8_table_with_anything_beside_it_is_not_plain(tmp_path: Path, suffix: str) -> None:
    tensors = {**llama_tensors(), f"model.embed_tokens.{suffix}": torch.ones(1)}
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].to(torch.float8_e4m3fn)
    table = ftw.inspect(write_checkpoint(tmp_path, tensors, llama_config())).verdict.token_embedding
    assert (table.eligible, table.reason) == (False, "unsupported_encoding")
    assert f"{suffix} lie beside it" in table.detail


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [("GLMModel", "glm"), ("GPT2LMHeadCustomModel", "gpt2"), ("GPT2HeadWithValueModel", "gpt2")],
    ids=str,
)
def test_class_with_a_head_under_another_name_is_tied(tmp_path: Path, architecture: str, model_type: str) -> None:
    config = llama_config(architectures=[architecture], model_type=model_type)
    table = ftw.inspect(write_checkpoint(tmp_path, llama_tensors(head=False), config)).verdict.token_embedding
    assert (table.eligible, table.reason) == (False, "tied")


def test_draft_model_with_a_vocabulary_of_its_own_is_untied(tmp_path: Path) -> None:
    tensors = {**llama_tensors(), "lm_head.weight": torch.ones(20, 8, dtype=torch.bfloat16)}
    assert ftw.inspect(write_checkpoint(tmp_path, tensors, llama_config())).is_host_eligible


def test_optimizer_state_is_no_table(tmp_path: Path) -> None:
    tensors = {**llama_tensors(), "optimizer.exp_avg.model.embed_tokens.weight": torch.ones(64, 8)}
    tables = ftw.inspect(write_checkpoint(tmp_path, tensors, llama_config())).verdict.tables
    assert [table.name for table in tables] == ["model.embed_tokens.weight"]


def test_thousands_of_tables_and_heads_are_refused(tmp_path: Path) -> None:
    tensors = {f"a{number}.embed_tokens.weight": torch.ones(1, 1) for number in range(150)}
    tensors |= {f"b{number}.lm_head.weight": torch.ones(1, 1) for number in range(150)}
    with pytest.raises(ftw.CheckpointError, match="150 token embeddings and 150 LM heads are stored"):
        ftw.inspect(write_checkpoint(tmp_path, tensors, llama_config()))
