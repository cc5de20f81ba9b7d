"""Lookup tables beside the token embedding: their roles, tables cut into shards, and where each of them goes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint, write_sharded
from places import DATA

import ftw
from ftw.checkpoint.tensor_names import find_heads, find_other_tables, find_token_embeddings
from ftw.verdict.verdict import TableVerdict

TABLES = json.loads((DATA / "other_tables.json").read_text())["tables"]
NOT_LISTED = {
    # A sinusoid beside RoFormer's encoder, not beside its embeddings; it is computed, and not stored by transformers 5.
    "roformer.encoder.embed_positions.weight",
}

F8, E8M0, F32, BF16 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32, torch.bfloat16
NGRAM = "model.layers.1.ple.ple_embedding.ngram_embedding"
PER_LAYER = "model.language_model.embed_tokens_per_layer.weight"
ENGRAM = "layers.2.engram.embed"
TOKENS = "model.embed_tokens.weight"


def role_of(name: str, beside: list[str]) -> str | None:
    """Return the role that a tensor has among the token embeddings of its architecture."""
    embeddings = find_token_embeddings([*beside, name])
    if any(name in module.tensors.values() for module in embeddings):
        return "token_embedding"
    roles = [role for role, module in find_other_tables([*beside, name], embeddings) if name in module.tensors.values()]
    assert len(roles) <= 1
    return roles[0] if roles else None


@pytest.mark.parametrize("name", TABLES, ids=str)
def test_table_of_transformers_has_its_role(name: str) -> None:
    assert role_of(name, TABLES[name]["beside"]) == (None if name in NOT_LISTED else TABLES[name]["role"])
    assert find_heads([name]) == []


def test_list_of_transformers_has_every_role() -> None:
    """Most of it are tables of images, sound, codebooks, layouts, entities and relative distances: no role."""
    roles = [table["role"] for table in TABLES.values()]
    assert {role: roles.count(role) for role in set(roles)} == {
        None: 167, "position_embedding": 66, "token_type_embedding": 47, "token_embedding": 23,
        "per_layer_embedding": 4, "ngram_embedding": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("per_layer_token_embd.weight", "per_layer_embedding"),
        ("model.embed_tokens_per_layer.weight", "per_layer_embedding"),
        ("ple_ngram_embd.weight", "ngram_embedding"),
        ("blk.3.ple_ngram_embd.weight", "ngram_embedding"),
        ("ple_ngram_embd.0.weight", "ngram_embedding"),
        (f"{NGRAM}.weight", "ngram_embedding"),
        (f"{NGRAM}.shard_0.weight", "ngram_embedding"),
        (f"{NGRAM}.shard_511.weight", "ngram_embedding"),
        (f"{ENGRAM}.weight", "ngram_embedding"),
        ("position_embd.weight", "position_embedding"),
        ("token_types.weight", "token_type_embedding"),
        ("model.layers.1.ple.ple_embedding.layer_multipliers", None),
        ("model.layers.1.ple.ple_embedding.ngram_heads_offsets", None),
        ("model.layers.1.ple.ple_embedding.ngram_heads_vocab_sizes", None),
        ("model.layers.1.per_layer_projection.weight", None),
        ("model.per_layer_model_projection.weight", None),
        ("layers.2.engram.proj.weight", None),
        ("decoder.ngram_embeddings.weight", None),
        ("embeddings.position_ids", None),
        (f"{NGRAM}.shard_x.weight", None),
        (f"{NGRAM}.bias", None),
    ],
    ids=str,
)
def test_table_by_its_name(name: str, role: str | None) -> None:
    assert role_of(name, ["token_embd.weight"]) == role


# tables in shards


def numbered(rows: int, columns: int = 8, first: int = 0, dtype: torch.dtype = F32) -> torch.Tensor:
    """Return rows of which each holds its own number, from `first` on."""
    return torch.arange(first, first + rows).reshape(rows, 1).expand(rows, columns).to(dtype).contiguous()


def ngram_shards(sizes: list[int], **options: Any) -> dict[str, torch.Tensor]:
    """Return the shards of a table whose rows are numbered from 1 on, in the order of a file: by name."""
    shards = {
        f"{NGRAM}.shard_{number}.weight": numbered(size, first=1 + sum(sizes[:number]), **options)
        for number, size in enumerate(sizes)
    }
    return dict(sorted(shards.items()))


def tables_of(folder: Path, tensors: dict[str, torch.Tensor]) -> list[TableVerdict]:
    """Return the verdicts on all tables but the token embedding of an untied Llama."""
    first, *others = ftw.inspect(
        write_checkpoint(folder, {**llama_tensors(), **tensors}, llama_config())
    ).verdict.tables
    assert (first.name, first.eligible) == (TOKENS, True)
    return others


def test_shards_are_one_table_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    sizes = [3] * 12
    [table] = tables_of(tmp_path, ngram_shards(sizes))
    assert (table.name, table.role, table.rows, table.columns) == (NGRAM, "ngram_embedding", 36, 8)
    assert (table.dtype, table.row_bytes, table.nbytes) == ("F32", 32, 36 * 32)
    assert (table.eligible, table.reason) == (True, "ok")
    assert table.detail == "read row by row, and no LM head shares it"
    assert table.tensors == tuple(f"{NGRAM}.shard_{number}.weight" for number in range(12))


def test_shards_in_several_files_are_one_table(tmp_path: Path) -> None:
    shards = ngram_shards([4] * 11)
    files = {f"model-{number:05}-of-00011.safetensors": {name: shards[name]} for number, name in enumerate(shards, 1)}
    files["model-00001-of-00011.safetensors"].update(llama_tensors())
    _, table = ftw.inspect(write_sharded(tmp_path, files, llama_config())).verdict.tables
    assert (table.rows, table.tensors[2], table.tensors[10]) == (
        44, f"{NGRAM}.shard_2.weight", f"{NGRAM}.shard_10.weight",
    )  # fmt: skip


def test_each_layer_has_a_table_of_its_own(tmp_path: Path) -> None:
    other = NGRAM.replace("layers.1", "layers.10")
    tables = tables_of(tmp_path, {**ngram_shards([2, 2]), f"{other}.weight": numbered(5)})
    assert sorted((table.name, table.rows, table.eligible) for table in tables) == [
        (NGRAM, 4, True), (f"{other}.weight", 5, True),
    ]  # fmt: skip


def test_joined_table_is_named_by_its_tensor(tmp_path: Path) -> None:
    [table] = tables_of(tmp_path, {f"{NGRAM}.weight": numbered(9)})
    assert (table.name, table.tensors, table.rows, table.reason) == (
        f"{NGRAM}.weight", (f"{NGRAM}.weight",), 9, "ok",
    )  # fmt: skip


def test_single_shard_is_named_by_its_tensor(tmp_path: Path) -> None:
    [table] = tables_of(tmp_path, ngram_shards([9]))
    assert (table.name, table.rows, table.reason) == (f"{NGRAM}.shard_0.weight", 9, "ok")


@pytest.mark.parametrize("sizes", [[3, 1, 5], [3, 0, 2], [1, 2, 0]], ids=str)
def test_shards_may_differ_in_rows(tmp_path: Path, sizes: list[int]) -> None:
    [table] = tables_of(tmp_path, ngram_shards(sizes))
    assert (table.rows, table.nbytes, table.reason) == (sum(sizes), sum(sizes) * 32, "ok")


@pytest.mark.parametrize(
    ("missing", "detail"),
    [(0, "its shard 0 is missing"), (1, "its shard 1 is missing"), (10, "its shard 10 is missing")],
    ids=["first", "second", "tenth"],
)
def test_missing_shard_is_named(tmp_path: Path, missing: int, detail: str) -> None:
    shards = ngram_shards([2] * 12)
    del shards[f"{NGRAM}.shard_{missing}.weight"]
    [table] = tables_of(tmp_path, shards)
    assert (table.reason, table.detail, table.eligible) == ("unsupported_encoding", detail, False)


@pytest.mark.parametrize(
    "config",
    [
        {"split_ngram_parts": 4},
        {"text_config": {"split_ngram_parts": 4}},
        {"llm_config": {"split_ngram_parts": 4}},
        {"thinker_config": {"text_config": {"split_ngram_parts": 4}}},
        {"thinker_config": {"split_ngram_parts": 4, "text_config": {"model_type": "qwen4_exp"}}},
    ],
    ids=["top", "text", "llm", "thinker-text", "thinker"],
)
def test_missing_last_shard_is_known_by_the_configuration(tmp_path: Path, config: dict[str, Any]) -> None:
    config = llama_config(model_type="qwen4_exp", **config)
    write_checkpoint(tmp_path, {**llama_tensors(), **ngram_shards([2] * 3)}, config)
    _, table = ftw.inspect(tmp_path).verdict.tables
    assert (table.reason, table.detail) == ("unsupported_encoding", "its shard 3 is missing")


@pytest.mark.parametrize(
    "last",
    [numbered(2, 4), numbered(2, dtype=BF16), numbered(2).reshape(-1), numbered(2).reshape(1, 2, 8)],
    ids=["narrower", "bf16", "flat", "deeper"],
)
def test_shards_that_do_not_fit_each_other_are_refused(tmp_path: Path, last: torch.Tensor) -> None:
    [table] = tables_of(tmp_path, {**ngram_shards([2, 2]), f"{NGRAM}.shard_2.weight": last})
    assert (table.name, table.reason, table.eligible) == (NGRAM, "unsupported_encoding", False)
    assert table.detail == "its shards have different dtypes or widths"


def test_fp8_shards_with_their_scale_are_refused(tmp_path: Path) -> None:
    shards = ngram_shards([2] * 11, dtype=F8)
    [table] = tables_of(tmp_path, {**shards, f"{NGRAM}.weight_scale": torch.ones(1)})
    assert (table.name, table.role, table.rows, table.reason) == (
        NGRAM, "ngram_embedding", 22, "unsupported_encoding",
    )  # fmt: skip
    assert table.detail == ("FP8 with one scale for the tensor: weight_scale lie beside it, so its rows are not plain")
    assert table.nbytes == 22 * 8 + 4


def test_bare_fp8_shards_are_plain(tmp_path: Path) -> None:
    [table] = tables_of(tmp_path, ngram_shards([2, 2], dtype=F8))
    assert (table.dtype, table.row_bytes, table.reason) == ("F8_E4M3", 8, "ok")


def test_engram_table_of_deepseek_is_refused_with_its_scheme(tmp_path: Path) -> None:
    scaled = {f"{ENGRAM}.weight": torch.ones(6, 64).to(F8), f"{ENGRAM}.scale": torch.ones(6, 2).to(E8M0)}
    [table] = tables_of(tmp_path, scaled)
    assert (table.name, table.role, table.rows, table.columns) == (f"{ENGRAM}.weight", "ngram_embedding", 6, 64)
    assert (table.reason, table.dtype, table.nbytes) == ("unsupported_encoding", "F8_E4M3", 6 * 64 + 6 * 2)
    assert table.detail == ("FP8 with a scale for each block of 1 x 32: scale lie beside it, so its rows are not plain")


def test_plain_engram_table_is_eligible(tmp_path: Path) -> None:
    [table] = tables_of(tmp_path, {f"{ENGRAM}.weight": numbered(6)})
    assert (table.role, table.reason) == ("ngram_embedding", "ok")


def test_every_table_counts_in_the_report(tmp_path: Path) -> None:
    beside = {
        PER_LAYER.replace(".language_model", ""): numbered(64, 16), **ngram_shards([3, 3]),
        f"{ENGRAM}.weight": numbered(4).to(F8), f"{ENGRAM}.scale": torch.ones(4, 1).to(E8M0),
    }  # fmt: skip
    report = ftw.inspect(write_checkpoint(tmp_path, {**llama_tensors(), **beside}, llama_config())).to_dict()
    rows = [(table["role"], table["rows"], table["columns"], table["eligible"]) for table in report["tables"]]
    assert rows[0] == ("token_embedding", 64, 8, True)
    assert sorted(rows[1:]) == [
        ("ngram_embedding", 4, 8, False), ("ngram_embedding", 6, 8, True), ("per_layer_embedding", 64, 16, True),
    ]  # fmt: skip
    assert report["host"].items() >= {"eligible": True, "nbytes": 64 * 16 + 64 * 16 * 4 + 6 * 8 * 4}.items()
    assert report["gain"]["vram_bytes"] == report["host"]["nbytes"]


def test_tables_without_a_token_embedding_are_listed_after_that_verdict(tmp_path: Path) -> None:
    report = ftw.inspect(write_checkpoint(tmp_path, ngram_shards([2, 2]), llama_config()))
    first, table = report.verdict.tables
    assert (first.reason, table.name, table.eligible) == ("no_table", NGRAM, True)
    assert report.gain.vram_bytes == 4 * 32
    assert not report.is_host_eligible


# placement, conversion, loading


SIZES = [3, 5, 1, 4, 2, 2, 2, 2, 2, 2, 6]
BORDERS = [0, 2, 3, 7, 8, 9, 24, 25, 30]  # first and last rows of shards; shard 10 follows shard 9, not shard 1


@pytest.fixture
def ngram_model(tmp_path: Path) -> Path:
    tensors = {**llama_tensors(), **ngram_shards(SIZES)}
    return write_checkpoint(tmp_path / "ngram", tensors, llama_config())


def assert_looked_up_across_shards(source: Path, embed: str) -> None:
    with ftw.load(source, embed=embed, device="cpu") as model:
        assert sorted(model.tables) == sorted([TOKENS, NGRAM])
        table = model.tables[NGRAM]
        assert (table.num_embeddings, table.embedding_dim, table.dtype) == (sum(SIZES), 8, F32)
        assert table(torch.tensor(BORDERS))[:, 0].tolist() == [1.0 + row for row in BORDERS]
        assert table(torch.arange(sum(SIZES))).equal(numbered(sum(SIZES), first=1))
        assert table(torch.tensor([[sum(SIZES), -1], [0, 30]]))[..., 0].tolist() == [[0.0, 0.0], [1.0, 31.0]]
        assert model.embedding(torch.tensor([5])).equal(llama_tensors()[TOKENS][5:6])
        assert model.memory.pinned_bytes == {TOKENS: 64 * 16, NGRAM: sum(SIZES) * 32}
        names = [name for name, _ in model.weights()]
    assert sorted(names) == sorted(set(llama_tensors()) - {TOKENS})


@pytest.mark.parametrize("embed", ["host", "auto"], ids=str)
def test_shards_are_loaded_as_one_table(ngram_model: Path, embed: str) -> None:
    assert_looked_up_across_shards(ngram_model, embed)


@pytest.mark.parametrize("embed", ["host", "auto"], ids=str)
def test_shards_survive_a_conversion(ngram_model: Path, tmp_path: Path, embed: str) -> None:
    result = ftw.convert(ngram_model, tmp_path / "out", embed=embed).to_dict()
    assert result["embed"]["placement"] == "host"
    assert sorted(result["embed"]["tables"]) == sorted([TOKENS, NGRAM])
    with ftw.open_checkpoint(tmp_path / "out") as checkpoint:
        on_host = {tensor.name: tensor.role for tensor in checkpoint.tensors.values() if tensor.placement == "host"}
        first = list(checkpoint.tensors)[: len(on_host)]
    assert on_host == {TOKENS: "token_embedding", **dict.fromkeys(ngram_shards(SIZES), "ngram_embedding")}
    assert set(first) == set(on_host)
    assert ftw.verify(tmp_path / "out", against=ngram_model).is_ok
    assert_looked_up_across_shards(tmp_path / "out", embed)
    before, after = ftw.inspect(ngram_model).to_dict(), ftw.inspect(tmp_path / "out").to_dict()
    assert after["tables"] == before["tables"]


def test_conversion_to_the_gpu_records_no_placement(ngram_model: Path, tmp_path: Path) -> None:
    ftw.convert(ngram_model, tmp_path / "out", embed="gpu")
    with ftw.open_checkpoint(tmp_path / "out") as checkpoint:
        assert {tensor.placement for tensor in checkpoint.tensors.values()} == {None}
    assert_looked_up_across_shards(tmp_path / "out", "host")


def test_shards_stay_among_the_weights_on_the_gpu(ngram_model: Path) -> None:
    with ftw.load(ngram_model, embed="gpu", device="cpu") as model:
        assert model.tables == {}
        assert {name for name, _ in model.weights()} == {*llama_tensors(), *ngram_shards(SIZES)}


GEMMA3N = llama_config(
    architectures=["Gemma3nForConditionalGeneration"], model_type="gemma3n", tie_word_embeddings=True
)


@pytest.fixture
def gemma3n(tmp_path: Path) -> Path:
    tensors = {
        "model.language_model.embed_tokens.weight": numbered(64), PER_LAYER: numbered(32, 16, first=7),
        "model.language_model.norm.weight": torch.ones(8),
    }  # fmt: skip
    return write_checkpoint(tmp_path / "gemma3n", tensors, GEMMA3N)


def test_auto_moves_a_per_layer_table_where_the_token_embedding_is_tied(gemma3n: Path, tmp_path: Path) -> None:
    token, per_layer = ftw.inspect(gemma3n).verdict.tables
    assert (token.reason, per_layer.reason, per_layer.role) == ("tied", "ok", "per_layer_embedding")
    result = ftw.convert(gemma3n, tmp_path / "out", embed="auto").to_dict()
    assert (result["embed"]["placement"], result["embed"]["tables"]) == ("gpu", [PER_LAYER])
    for source in (gemma3n, tmp_path / "out"):
        with ftw.load(source, embed="auto", device="cpu") as model:
            assert list(model.tables) == [PER_LAYER]
            assert model.tables[PER_LAYER](torch.tensor([0, 31]))[:, 0].tolist() == [7.0, 38.0]
            assert (model.memory.placement, model.memory.reason) == ("gpu", token.detail)
            assert model.memory.pinned_bytes == {PER_LAYER: 32 * 16 * 4}
            assert model.embedding.placement == "gpu"
            assert model.embedding(torch.tensor([63]))[0, 0] == 63
            assert sorted(name for name, _ in model.weights()) == [
                "model.language_model.embed_tokens.weight", "model.language_model.norm.weight",
            ]  # fmt: skip


def test_host_is_refused_for_the_tied_embedding_whatever_else_may_move(gemma3n: Path, tmp_path: Path) -> None:
    refused = r"model\.language_model\.embed_tokens\.weight: refused: the LM head uses this"
    with pytest.raises(ftw.NotEligibleError, match=refused):
        ftw.convert(gemma3n, tmp_path / "out", embed="host")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ftw.NotEligibleError, match=refused):
        ftw.load(gemma3n, embed="host", device="cpu")


def test_position_and_token_type_tables_stay(tmp_path: Path) -> None:
    path = "bert.embeddings"
    tensors = {
        f"{path}.word_embeddings.weight": numbered(64), f"{path}.position_embeddings.weight": numbered(16),
        f"{path}.token_type_embeddings.weight": numbered(2), "classifier.weight": numbered(2),
    }  # fmt: skip
    config = llama_config(architectures=["BertForSequenceClassification"], model_type="bert")
    source = write_checkpoint(tmp_path / "bert", tensors, config)
    tables = ftw.inspect(source).verdict.tables
    assert [(table.role, table.rows) for table in tables] == [
        ("token_embedding", 64), ("position_embedding", 16), ("token_type_embedding", 2),
    ]  # fmt: skip
    result = ftw.convert(source, tmp_path / "out", embed="host").to_dict()
    assert result["embed"]["tables"] == [f"{path}.word_embeddings.weight"]
    with ftw.load(source, embed="host", device="cpu") as model:
        assert list(model.tables) == [f"{path}.word_embeddings.weight"]
        assert {name for name, _ in model.weights()} == set(tensors) - set(model.tables)
