"""Ranges of token ids, for engines that sum over ranks themselves: what is read, and which ids give zeros."""

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint
from tp_tables import TABLE, as_bytes, special_rows, wanted_rows, write_table

import ftw


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", llama_tensors(), llama_config())


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("embed", ["host", "auto-gpu"])
def test_range_of_ids_gives_their_rows_and_zeros_for_others(tmp_path: Path, embed: str, id_dtype: torch.dtype) -> None:
    table = special_rows(23, 8, torch.bfloat16)
    source = write_table(tmp_path / "m", table)
    if embed == "auto-gpu":
        write_checkpoint(source, {TABLE: table}, llama_config(vocab_size=23, tie_word_embeddings=True))
    ids = torch.tensor([-1, 0, 6, 7, 8, 18, 19, 22, 23, 2**31 - 1], dtype=id_dtype)
    for start, length in [(7, 12), (0, 23), (22, 1), (0, 0), (23, 0)]:
        option = "host" if embed == "host" else "auto"
        with ftw.load(source, embed=option, device="cpu", vocab_range=(start, length)) as model:
            is_own = (ids >= start) & (ids < start + length)
            wanted = wanted_rows(table, ids.long().where(is_own, -1))
            assert as_bytes(model.embedding(ids)) == as_bytes(wanted)
            assert model.embedding.vocab_range == (start, length)
            assert model.embedding.placement == ("host" if embed == "host" else "gpu")
            assert model.memory.total_pinned_bytes == (length * 16 if embed == "host" else 0)
            if embed != "host":
                assert as_bytes(dict(model.weights())[TABLE]) == as_bytes(table)


def test_range_of_ids_is_clipped_to_a_per_layer_table_and_not_for_ngrams(tmp_path: Path) -> None:
    per_layer, ngrams = special_rows(20, 8, torch.bfloat16), special_rows(9, 4, torch.bfloat16)
    names = ("model.embed_tokens_per_layer.weight", "model.ngram_embedding.weight")
    others = dict(zip(names, (per_layer, ngrams), strict=True))
    source = write_checkpoint(tmp_path / "m", {**llama_tensors(), **others}, llama_config())
    for start, length, kept in [(0, 64, 20), (15, 30, 5), (20, 3, 0), (40, 24, 0)]:
        with ftw.load(source, embed="host", device="cpu", vocab_range=(start, length)) as model:
            assert model.tables[names[0]].vocab_range == (start, kept)
            assert as_bytes(model.tables[names[0]].table) == as_bytes(per_layer[start : start + length])
            assert as_bytes(model.tables[names[1]].table) == as_bytes(ngrams)


@pytest.mark.parametrize(
    "vocab_range", [(0, 65), (64, 1), (-1, 3), (3, -1), (1.0, 2), (True, 2), (1,), (0, 1, 2), 3, "ab"], ids=str
)
def test_range_outside_of_the_table_is_a_value_error(source: Path, vocab_range: Any) -> None:
    with pytest.raises(ValueError, match=r"^vocab_range is .* within the 64 rows of model.embed_tokens.weight"):
        ftw.load(source, embed="host", device="cpu", vocab_range=vocab_range)


@pytest.mark.parametrize("options", [{"share": "node", "embed": "host"}, {"embed": "gpu"}], ids=["share", "gpu"])
def test_range_is_refused_where_nothing_is_cut(source: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="vocab_range cuts tables"):
        ftw.load(source, device="cpu", vocab_range=(0, 4), **options)
