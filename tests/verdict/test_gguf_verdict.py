"""Verdicts on GGUF files: roles by name, the tie by whether a head is stored, what leaving the GPU frees."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint
from ftw.cli.main import main
from gguf import GGMLQuantizationType, GGUFEndian, GGUFValueType
from gguf_builder import Blocks, random_blocks, write_gguf

import ftw
from ftw.verdict.placement import plan_placement
from ftw.verdict.report import Report
from ftw.verdict.verdict import TableVerdict

U32, ARRAY = GGUFValueType.UINT32, GGUFValueType.ARRAY
TABLE, HEAD = "token_embd.weight", "output.weight"
ROWS, COLUMNS = 10, 64


def matrix(rows: int = ROWS, columns: int = COLUMNS, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def packed(name: str = "Q8_0", rows: int = ROWS, blocks: int = 2, seed: int = 0) -> Blocks:
    return random_blocks(GGMLQuantizationType[name], rows, blocks, seed=seed)


def kvs_of(architecture: str = "llama", *, tokens: int | None = ROWS, **facts: Any) -> dict[str, Any]:
    """Return the keys of a model 64 values wide; double underscores stand for dots."""
    values = {"block_count": 2, "embedding_length": COLUMNS, "attention__head_count": 4, **facts}
    kvs: dict[str, Any] = {
        f"{architecture}.{key.replace('__', '.')}": (ARRAY if isinstance(value, list) else U32, value)
        for key, value in values.items()
        if value is not None
    }
    if tokens is not None:
        kvs["tokenizer.ggml.tokens"] = (ARRAY, [f"t{number}" for number in range(tokens)])
    return kvs


def inspect(
    folder: Path, tensors: dict[str, np.ndarray | Blocks], architecture: str = "llama", **options: Any
) -> Report:
    kvs = kvs_of(architecture, **options)
    folder.mkdir(exist_ok=True)
    return ftw.inspect(write_gguf(folder / "m.gguf", tensors, kvs, architecture=architecture))


def words(table: TableVerdict) -> tuple[str, str, bool, str, str]:
    return (table.name, table.role, table.eligible, table.reason, table.detail)


# the tie


@pytest.mark.parametrize("table", [matrix(), packed()], ids=["plain", "packed"])
def test_file_without_head_is_tied(tmp_path: Path, table: np.ndarray | Blocks) -> None:
    report = inspect(tmp_path, {TABLE: table, "output_norm.weight": matrix(1)[0]})
    [found] = report.verdict.tables
    detail = "tied to the LM head: llama has one, and none is stored"
    assert words(found) == (TABLE, "token_embedding", False, "tied", detail)
    assert (report.verdict.tied, report.verdict.tie_evidence) == (True, ("no LM head stored",))
    assert report.to_dict()["host"] == {"eligible": False, "reason": "tied", "nbytes": 0}
    assert found.unreadable == ""


def test_file_with_a_head_is_untied(tmp_path: Path) -> None:
    report = inspect(tmp_path, {TABLE: packed(), HEAD: packed("Q6_K", blocks=1)})
    [found] = report.verdict.tables
    assert words(found) == (TABLE, "token_embedding", True, "ok", "untied: output.weight is stored")
    assert (found.rows, found.columns, found.dtype, found.row_bytes, found.nbytes) == (10, 64, "Q8_0", 68, 680)
    assert (report.verdict.tied, report.verdict.tie_evidence) == (False, ("tensor:output.weight",))
    assert report.to_dict()["host"] == {"eligible": True, "reason": "ok", "nbytes": 680}
    assert report.verdict.warnings == ()


@pytest.mark.parametrize("table", [matrix(), packed()], ids=["plain", "packed"])
def test_head_of_equal_bytes_is_untied_with_a_note(tmp_path: Path, table: np.ndarray | Blocks) -> None:
    report = inspect(tmp_path, {TABLE: table, HEAD: table})
    [found] = report.verdict.tables
    detail = "untied: output.weight is stored, though with the same bytes"
    assert words(found) == (TABLE, "token_embedding", True, "ok", detail)
    assert (report.verdict.tied, report.verdict.tie_evidence) == (False, ("tensor:output.weight", "bytes:equal"))


def test_head_in_another_shard_is_found(tmp_path: Path) -> None:
    tensors = {TABLE: packed(), "blk.0.attn_q.weight": packed(), HEAD: packed(seed=1)}
    write_gguf(tmp_path / "m.gguf", tensors, kvs_of(), split_max_tensors=1)
    assert len(list(tmp_path.glob("m-*-of-00003.gguf"))) == 3
    for source in (tmp_path, tmp_path / "m-00002-of-00003.gguf"):
        assert ftw.inspect(source).verdict.token_embedding.detail == "untied: output.weight is stored"


@pytest.mark.parametrize(
    "stray", ["output.bias", "output_norm.weight", "cls.output.weight", "blk.1.nextn.shared_head_head.weight",
              "cls.weight", "lm_head.weight", "head.weight", "decoder.weight"], ids=str,
)  # fmt: skip
def test_nothing_but_output_weight_is_a_head(tmp_path: Path, stray: str) -> None:
    """llama.cpp takes the head from output.weight, and from token_embd.weight where that is not stored."""
    [found] = inspect(tmp_path, {TABLE: packed(), stray: matrix(2)}).verdict.tables
    assert (found.reason, found.eligible) == ("tied", False)


@pytest.mark.parametrize("order", [GGUFEndian.LITTLE, GGUFEndian.BIG], ids=["little", "big"])
@pytest.mark.parametrize("head", [False, True], ids=["tied", "untied"])
def test_ftw_is_judged_as_the_gguf_that_it_was_made_from(tmp_path: Path, head: bool, order: GGUFEndian) -> None:
    tensors = {TABLE: packed(), **({HEAD: packed(seed=1)} if head else {})}
    source = write_gguf(tmp_path / "m.gguf", tensors, kvs_of(tokens=9), order=order)
    ftw.convert(source, tmp_path / "out", embed="auto")
    before, after = ftw.inspect(source).verdict, ftw.inspect(tmp_path / "out").verdict
    assert (after.tables, after.tied, after.warnings) == (before.tables, before.tied, before.warnings[-1:])
    is_guess = any("do not tell" in warning for warning in before.warnings)  # random blocks
    assert is_guess is (order is GGUFEndian.BIG)
    assert after.tie_evidence == (f"gguf:output_weight_present={str(head).lower()}", *before.tie_evidence)


@pytest.mark.parametrize("head", [False, True], ids=["lost", "appeared"])
def test_metadata_that_contradict_the_tensors_are_a_conflict(tmp_path: Path, head: bool) -> None:
    tensors = {TABLE: packed(), **({HEAD: packed(seed=1)} if head else {})}
    kvs = {**kvs_of(), "freetoken.output_weight_present": (GGUFValueType.BOOL, not head)}
    report = ftw.inspect(write_gguf(tmp_path / "m.gguf", tensors, kvs))
    [found] = report.verdict.tables
    detail = (
        "output.weight is stored, but the metadata say that there was no head"
        if head
        else "no LM head is stored, but the metadata say that there was one"
    )
    assert words(found) == (TABLE, "token_embedding", False, "tie_conflict", detail)
    assert report.verdict.tied is None


def test_file_without_head_of_an_unknown_architecture_may_be_tied(tmp_path: Path) -> None:
    report = inspect(tmp_path, {TABLE: packed()}, "newer-than-gguf")
    [found] = report.verdict.tables
    detail = "no LM head is stored, and whether the architecture newer-than-gguf has one is not known"
    assert words(found) == (TABLE, "token_embedding", False, "tied", detail)
    assert (report.verdict.tied, report.verdict.tie_evidence) == (None, ("no LM head stored",))
    known = inspect(tmp_path / "head", {TABLE: packed(), HEAD: packed(seed=1)}, "newer-than-gguf")
    assert (known.is_host_eligible, known.verdict.tied) == (True, False)


@pytest.mark.parametrize("rows", [3, 4], ids=str)
def test_draft_model_has_a_head_of_its_own_vocabulary(tmp_path: Path, rows: int) -> None:
    """EAGLE-3, as llama.cpp converts it: d2t maps the draft's tokens to the target's."""
    tensors = {TABLE: packed(), HEAD: packed(rows=rows, seed=1)}
    draft = inspect(tmp_path / "draft", {**tensors, "d2t": np.zeros(rows, np.int64)}, "eagle3")
    assert words(draft.verdict.tables[0])[2:] == (True, "ok", "untied: output.weight is stored")
    assert draft.verdict.tied is False
    assert not inspect(tmp_path / "other", tensors, "eagle3").is_host_eligible
    twin = {"model.embed_tokens.weight": torch.ones(64, 8), "lm_head.weight": torch.ones(rows, 8), "d2t": torch.ones(3)}
    assert ftw.inspect(write_checkpoint(tmp_path / "twin", twin, llama_config())).is_host_eligible


# encoders and other tables


def test_encoders_tables_are_all_eligible(tmp_path: Path) -> None:
    tensors = {
        "token_types.weight": matrix(2), "position_embd.weight": matrix(16), TABLE: packed(),
        "token_embd_norm.weight": matrix(1)[0], "cls.weight": matrix(COLUMNS), "blk.0.attn_q.weight": packed(),
    }  # fmt: skip
    report = inspect(tmp_path, tensors, "bert")
    found = {table.name: words(table)[1:] for table in report.verdict.tables}
    beside = "read row by row, and no LM head shares it"
    assert found == {
        TABLE: ("token_embedding", True, "ok", "untied: bert has no LM head"),
        "position_embd.weight": ("position_embedding", True, "ok", beside),
        "token_types.weight": ("token_type_embedding", True, "ok", beside),
    }
    assert report.verdict.token_embedding.name == TABLE
    assert report.verdict.tied is False
    assert report.verdict.tie_evidence == ("architecture:bert", "no LM head")
    assert report.to_dict()["host"] == {"eligible": True, "reason": "ok", "nbytes": 680 + 16 * 256 + 2 * 256}
    assert report.gain.kv_bytes_per_token is None


@pytest.mark.parametrize(
    "architecture", ["nomic-bert", "nomic-bert-moe", "jina-bert-v2", "modern-bert", "gemma-embedding", "t5encoder"]
)
def test_encoder_has_no_head(tmp_path: Path, architecture: str) -> None:
    report = inspect(tmp_path, {TABLE: packed()}, architecture)
    assert report.verdict.token_embedding.detail == f"untied: {architecture} has no LM head"


@pytest.mark.parametrize("architecture", ["gemma", "gemma3", "command-r", "bitnet", "t5", "llama"])
def test_any_other_architecture_has_a_head(tmp_path: Path, architecture: str) -> None:
    report = inspect(tmp_path, {TABLE: packed()}, architecture)
    assert (report.verdict.token_embedding.reason, report.verdict.tied) == ("tied", True)


def test_of_an_unknown_architecture_it_is_not_known_whether_it_has_a_head(tmp_path: Path) -> None:
    report = inspect(tmp_path, {TABLE: packed()}, "never-heard-of")
    assert (report.verdict.token_embedding.reason, report.verdict.tied) == ("tied", None)
    words = "no LM head is stored, and whether the architecture never-heard-of has one is not known"
    assert report.verdict.token_embedding.detail == words
    (tmp_path / "m.gguf").unlink()
    assert inspect(tmp_path, {TABLE: packed(), HEAD: packed(seed=1)}, "never-heard-of").verdict.tied is False


def per_layer(folder: Path) -> Report:
    tensors = {TABLE: packed(), "per_layer_token_embd.weight": packed("Q5_K", blocks=3)}
    return inspect(folder, tensors, "gemma3n")


def test_per_layer_table_leaves_where_the_token_embedding_is_tied(tmp_path: Path) -> None:
    verdict = per_layer(tmp_path).verdict
    assert [(table.name, table.role, table.eligible, table.reason) for table in verdict.tables] == [
        (TABLE, "token_embedding", False, "tied"),
        ("per_layer_token_embd.weight", "per_layer_embedding", True, "ok"),
    ]
    table = verdict.tables[1]
    assert (table.rows, table.columns, table.dtype, table.row_bytes) == (ROWS, 768, "Q5_K", 3 * 176)
    where = plan_placement(verdict, "auto", "model")
    assert (where.placement, where.host_tables) == ("gpu", (table,))
    assert where.reason == "tied to the LM head: gemma3n has one, and none is stored"
    assert plan_placement(verdict, "gpu", "model").host_tables == ()


def test_host_is_refused_where_the_token_embedding_is_tied(tmp_path: Path) -> None:
    verdict = per_layer(tmp_path).verdict
    with pytest.raises(ftw.NotEligibleError) as caught:
        plan_placement(verdict, "host", "model")
    assert str(caught.value) == (
        "model: token_embd.weight: refused: the LM head uses this same table (gemma3n has one, and none is stored); "
        "use embed='gpu' or 'auto'"
    )


def test_per_layer_table_counts_for_the_gain_though_the_source_is_not_eligible(tmp_path: Path) -> None:
    report = per_layer(tmp_path)
    assert report.to_dict()["host"].items() >= {"eligible": False, "nbytes": ROWS * 3 * 176}.items()
    assert report.gain.vram_bytes == ROWS * 3 * 176


@pytest.mark.parametrize(
    "name",
    [
        "blk.2.nextn.embed_tokens.weight", "v.token_embd.img_break.weight", "mm.embedding.weight",
        "mm.a.embedding.weight", "v.position_embd.weight", "a.position_embd.weight", "token_embd_norm.weight",
        "blk.0.token_embd.weight", "token_embd.bias",
    ],
    ids=str,
)  # fmt: skip
def test_tensor_of_another_part_is_no_table(tmp_path: Path, name: str) -> None:
    report = inspect(tmp_path, {TABLE: packed(), HEAD: packed(seed=1), name: matrix()})
    assert [table.name for table in report.verdict.tables] == [TABLE]
    alone = inspect(tmp_path, {name: matrix()})
    assert [table.reason for table in alone.verdict.tables] == ["no_table"]


def test_file_of_a_vocabulary_alone_has_no_table(tmp_path: Path) -> None:
    report = inspect(tmp_path, {})
    [found] = report.verdict.tables
    assert words(found) == ("", "token_embedding", False, "no_table", "no tensor has the name of a token embedding")
    assert (report.num_tensors, report.verdict.tied, report.verdict.warnings) == (0, None, ())
    assert report.config.num_tokens == ROWS


# encodings


@pytest.mark.parametrize("head", [True, False], ids=["untied", "tied"])
@pytest.mark.parametrize("name", ["Q8_1", "Q8_K", "Q1_0"])
def test_type_without_a_decoder_is_refused(tmp_path: Path, name: str, head: bool) -> None:
    columns = 2 * gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]][0]
    tensors = {TABLE: packed(name), **({HEAD: matrix(ROWS, columns)} if head else {})}
    report = inspect(tmp_path, tensors, embedding_length=columns)
    [found] = report.verdict.tables
    detail = f"its rows are packed as {name}, which no lookup unpacks"
    assert found.unreadable == detail
    assert (found.reason, found.dtype) == ("unsupported_encoding" if head else "tied", name)
    assert found.detail == (detail if head else "tied to the LM head: llama has one, and none is stored")
    assert report.dtypes[name] == found.nbytes


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i1", "i2", "i4", "i8"])
def test_plain_table_is_eligible_integers_too(tmp_path: Path, dtype: str) -> None:
    table = np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS).astype(dtype)
    report = inspect(tmp_path, {TABLE: table, HEAD: matrix()})
    [found] = report.verdict.tables
    assert (found.eligible, found.rows, found.columns) == (True, ROWS, COLUMNS)
    assert found.row_bytes == COLUMNS * table.dtype.itemsize
    assert found.dtype == f"{dtype[0].upper()}{table.dtype.itemsize * 8}"


def test_integer_table_of_safetensors_stays_refused(tmp_path: Path) -> None:
    tensors = llama_tensors() | {"model.embed_tokens.weight": torch.ones(64, 8, dtype=torch.int8)}
    write_checkpoint(tmp_path, tensors, llama_config())
    assert ftw.inspect(tmp_path).verdict.token_embedding.reason == "unsupported_encoding"


def test_table_that_is_no_matrix_is_refused(tmp_path: Path) -> None:
    [found] = inspect(tmp_path, {TABLE: np.ones((2, 5, 64), np.float32), HEAD: matrix()}).verdict.tables
    assert (found.reason, found.detail) == (
        "unsupported_encoding",
        "its shape is [2, 5, 64], [rows, columns] is needed",
    )


def test_scale_beside_the_table_is_refused(tmp_path: Path) -> None:
    tensors = {TABLE: packed("NVFP4", blocks=1), HEAD: matrix(), "token_embd.scale": np.ones(1, np.float32)}
    [found] = inspect(tmp_path, tensors).verdict.tables
    assert found.reason == "unsupported_encoding"
    assert found.detail.endswith("scale lie beside it, so its rows are not plain")
    assert "INT8" not in found.detail


# warnings


@pytest.mark.parametrize("tokens", [9, 11], ids=str)
@pytest.mark.parametrize("table", [matrix(), packed()], ids=["plain", "packed"])
def test_token_list_of_another_length_is_warned_of(tmp_path: Path, table: np.ndarray | Blocks, tokens: int) -> None:
    report = inspect(tmp_path, {TABLE: table, HEAD: matrix()}, tokens=tokens)
    assert report.verdict.warnings == (
        f"token_embd.weight has 10 rows, the tokenizer's list {tokens} tokens; the table's rows count",
    )
    assert report.verdict.token_embedding.rows == 10
    assert report.verdict.token_embedding.eligible


@pytest.mark.parametrize("tokens", [ROWS, None], ids=["equal", "none"])
def test_token_list_that_fits_or_is_missing_is_not_warned_of(tmp_path: Path, tokens: int | None) -> None:
    assert inspect(tmp_path, {TABLE: packed()}, tokens=tokens, vocab_size=7).verdict.warnings == ()


# the gain


def test_gain_counts_stacked_experts_and_the_cache(tmp_path: Path) -> None:
    experts = {
        f"blk.{block}.ffn_{part}_exps.weight": Blocks(
            np.zeros((8, 6, nbytes), np.uint8), GGMLQuantizationType[ggml_type]
        )
        for block in (0, 1)
        for part, ggml_type, nbytes in (("gate", "Q4_0", 36), ("up", "Q4_0", 36), ("down", "Q8_0", 68))
    }
    others = {"blk.0.ffn_gate_inp.weight": matrix(8), "blk.0.ffn_up_shexp.weight": matrix()}
    tensors = {TABLE: packed(), HEAD: packed(seed=1), **experts, **others}
    facts = {"expert_count": 8, "expert_used_count": 2, "attention__head_count_kv": 2}
    expected = {
        "vram_bytes": 680,
        "expert_slot_bytes": 6 * (36 + 36 + 68),
        "expert_slots": 0,
        "kv_bytes_per_token": 2 * 2 * (16 + 16) * 2,
        "kv_tokens": 680 // 256,
    }
    assert inspect(tmp_path, tensors, "qwen3moe", **facts).to_dict()["gain"] == expected
    ftw.convert(tmp_path / "m.gguf", tmp_path / "out", embed="host")
    assert ftw.inspect(tmp_path / "out").to_dict()["gain"] == expected


def test_report_has_the_keys_of_every_format(tmp_path: Path) -> None:
    found = inspect(tmp_path, {TABLE: packed(), HEAD: matrix()}).to_dict()
    other = ftw.inspect(write_checkpoint(tmp_path / "st", llama_tensors(), llama_config())).to_dict()
    for part in ("tied", "host", "gain"):
        assert list(found[part]) == list(other[part])
    assert list(found) == list(other)
    assert [list(table) for table in found["tables"]] == [list(table) for table in other["tables"]]
    assert (found["format"], found["architecture"], found["model_type"]) == ("gguf", "llama", "llama")
    assert found["dtypes"] == {"F32": ROWS * COLUMNS * 4, "Q8_0": 680}
    assert (found["num_tensors"], found["nbytes"]) == (2, ROWS * COLUMNS * 4 + 680)


# the command line


@pytest.mark.parametrize("head", [True, False], ids=["untied", "tied"])
def test_cli_check_tells_whether_the_table_may_leave(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], head: bool
) -> None:
    tensors = {TABLE: packed(), **({HEAD: packed(seed=1)} if head else {})}
    path = write_gguf(tmp_path / "m.gguf", tensors, kvs_of())
    assert main(["inspect", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out), err) == (ftw.inspect(str(path)).to_dict(), "")
    assert main(["inspect", str(path), "--check"]) == (0 if head else 3)
    out, err = capsys.readouterr()
    assert TABLE in out
    why = "the LM head uses this same table (llama has one, and none is stored)"
    refusal = f"ftw: error: {path}: {TABLE}: refused: {why}\n"
    assert err == ("" if head else refusal)


def test_cli_check_refuses_a_vocabulary_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, kvs_of())
    assert main(["inspect", str(path)]) == 0
    assert "it is a vocabulary alone, without weights" in capsys.readouterr().out
    assert main(["inspect", str(path), "--check"]) == 3


def test_cli_warns_of_the_vocabulary_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(tmp_path / "m.gguf", {TABLE: packed(), HEAD: packed(seed=1)}, kvs_of(tokens=9))
    assert main(["inspect", str(path), "--json"]) == 0
    assert capsys.readouterr().err == (
        "ftw: warning: token_embd.weight has 10 rows, the tokenizer's list 9 tokens; the table's rows count\n"
    )
