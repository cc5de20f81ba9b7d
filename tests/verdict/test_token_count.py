"""Warnings where the tokenizer or config.json has another number of tokens than the table has rows."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import llama_config, write_checkpoint

import ftw

TABLE = "model.embed_tokens.weight"
FEWER = f"{TABLE} has 64 rows, but the tokenizer has a token with the id "


def warnings_of(folder: Path, rows: int = 64, vocab_size: int = 64, **files: Any) -> tuple[str, ...]:
    """Judge a table beside the tokenizer's files, whose names are given without their suffix."""
    tensors = {TABLE: torch.ones(rows, 2, dtype=torch.bfloat16), "lm_head.weight": torch.ones(rows, 2)}
    write_checkpoint(folder, tensors, llama_config(vocab_size=vocab_size))
    for name, content in files.items():
        text = content if isinstance(content, (str, bytes)) else json.dumps(content)
        (folder / f"{name}.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    report = ftw.inspect(folder)
    assert report.is_host_eligible
    return report.verdict.warnings


def tokenizer(*ids: Any, **others: Any) -> dict[str, Any]:
    """Return a tokenizer.json as the tokenizers package orders it."""
    added = [{"id": number, "content": f"<{number}>", "special": True} for number in ids]
    model = {"type": "BPE", "vocab": {"a": 0, "b": 200}}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **others, "model": model}


@pytest.mark.parametrize(
    ("files", "last"),
    [
        ({"tokenizer": tokenizer(0, 63)}, None),
        ({"tokenizer": tokenizer(0, 64)}, 64),
        ({"tokenizer": tokenizer(90, 3)}, 90),
        ({"tokenizer": tokenizer()}, None),
        ({"added_tokens": {"<a>": 64, "<b>": 65}}, 65),
        ({"added_tokens": {"<a>": 62, "<b>": 63}}, None),
        ({"tokenizer_config": {"added_tokens_decoder": {"0": {"content": "<s>"}, "64": {"content": "<a>"}}}}, 64),
        ({"tokenizer_config": {"added_tokens_decoder": {"1": {}}}, "added_tokens": {"<a>": 99}}, 99),
        ({"tokenizer": tokenizer(3), "added_tokens": {"<a>": 99}}, None),  # the tokenizers package reads one file
        ({"tokenizer_config": {}}, None),
    ],
    ids="as-many one-more unsorted none-added added added-inside decoder both whole-first empty".split(),
)
def test_token_without_a_row_is_warned_of(tmp_path: Path, files: dict[str, Any], last: int | None) -> None:
    assert warnings_of(tmp_path, **files) == (() if last is None else (f"{FEWER}{last}",))


@pytest.mark.parametrize(
    "content",
    ["{", "[]", b"\xff\xfe", "{}", '{"added_tokens": {"a": 99}}',
     '{"added_tokens": [99, {"id": "99"}, {"id": -99}, {}]}',
     '{"added_tokens": [{"id": true}]}', '{"added_tokens": [{"id": 1e99}]}',
     json.dumps({"model": {}, "added_tokens": [{"id": 99}]})],
    ids="cut list bytes empty object no-ids bool float behind-model".split(),
)  # fmt: skip
@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_config", "added_tokens"], ids=str)
def test_file_that_tells_nothing_is_passed_over(tmp_path: Path, name: str, content: str | bytes) -> None:
    assert warnings_of(tmp_path, **{name: content}) == ()


def test_long_vocabulary_is_not_read(tmp_path: Path) -> None:
    text = json.dumps(tokenizer(70, normalizer="x" * (1 << 20)))
    assert warnings_of(tmp_path, tokenizer=text + "no JSON from here on") == (f"{FEWER}70",)


def test_link_out_of_the_folder_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps(tokenizer(99)))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").symlink_to(tmp_path / "other.json")
    assert warnings_of(tmp_path / "model") == ()


@pytest.mark.parametrize(
    ("rows", "vocab_size", "added", "warned"),
    [
        (32064, 32000, (), False),  # padded to a multiple of 64
        (151936, 151643, (151668,), False),  # Qwen 3, whose config.json says 151,936
        (201088, 201088, (200018,), False),  # gpt-oss keeps ids for later
        (1088, 64, (), False),
        (1089, 64, (), True),
        (34025, 32000, (), True),
        (128256, 32000, (), True),  # the vocabulary of another model
        (128256, 2051, (128255,), False),  # CSM: the codes' vocab_size, and the text's tokenizer
    ],
    ids="padded qwen reserved small small-more more other csm".split(),
)
def test_many_more_rows_than_tokens_are_warned_of(
    tmp_path: Path, rows: int, vocab_size: int, added: tuple[int, ...], warned: bool
) -> None:
    found = warnings_of(tmp_path, rows, vocab_size, tokenizer=tokenizer(*added))
    told = f"{TABLE} has {rows} rows, many more than the vocab_size {vocab_size} of config.json; the table's rows count"
    assert found == ((told,) if warned else ())


def test_both_directions_name_what_they_count(tmp_path: Path) -> None:
    assert warnings_of(tmp_path, 60, 63, tokenizer=tokenizer(65)) == (
        f"{TABLE} has 60 rows, fewer than the vocab_size 63 of config.json",
        f"{TABLE} has 60 rows, but the tokenizer has a token with the id 65",
    )
    assert warnings_of(tmp_path, 4000, 64, tokenizer=tokenizer(99)) == (
        f"{TABLE} has 4000 rows, many more than 100 tokens; the table's rows count",
    )
