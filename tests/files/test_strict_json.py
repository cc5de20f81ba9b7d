"""Strict JSON: what is refused beyond Python's own parser, and how messages show what they found."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inspecting import assert_names_file
from json_cases import ACCEPTED, REFUSED

from ftw import CheckpointError
from ftw.files import strict_json
from ftw.files.strict_json import is_count, parse_json_object, read_json_file, short_repr

PATH = Path("/folder/file.json")


@pytest.mark.parametrize(("text", "problem"), REFUSED.values(), ids=REFUSED)
def test_text_is_refused(text: bytes, problem: str) -> None:
    with pytest.raises(CheckpointError, match=f"subject: {problem}") as caught:
        parse_json_object(text, PATH, "subject")
    assert_names_file(caught.value, PATH)


@pytest.mark.parametrize(("text", "value"), ACCEPTED.values(), ids=ACCEPTED)
def test_text_is_parsed(text: bytes, value: dict[str, Any]) -> None:
    assert parse_json_object(text, PATH, "subject") == value
    assert parse_json_object(memoryview(text), PATH, "subject") == value


def test_nesting_up_to_the_bound_is_parsed(tmp_path: Path) -> None:
    text = '{"a":' * 127 + "1" + "}" * 127
    (tmp_path / "file").write_text(text)
    assert json.dumps(read_json_file(tmp_path / "file"), separators=(",", ":")) == text


@pytest.mark.parametrize(
    "text", ['{"a":' * 128 + "1" + "}" * 128, '{"a":' + "[" * 127 + "]" * 127 + "}"], ids=["objects", "lists"]
)
def test_nesting_beyond_the_bound_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(CheckpointError, match="json: is nested too deeply, at most 127 levels"):
        read_json_file(tmp_path / "file")


def test_non_finite_numbers_are_parsed_where_they_are_allowed(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"time_step_limit": [0.0, Infinity], "low": -1e999}')
    assert read_json_file(file, allow_non_finite=True) == {"time_step_limit": [0.0, float("inf")], "low": float("-inf")}
    with pytest.raises(CheckpointError, match="json: holds 'Infinity', numbers must be finite") as caught:
        read_json_file(file)
    assert_names_file(caught.value, file)


def test_file_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.json"
    file.write_text('{"a":1}')
    monkeypatch.setattr(strict_json, "MAX_NBYTES", 7)
    assert read_json_file(file) == {"a": 1}
    monkeypatch.setattr(strict_json, "MAX_NBYTES", 6)
    with pytest.raises(CheckpointError, match="json: is larger than 6 bytes") as caught:
        read_json_file(file)
    assert_names_file(caught.value, file)


def test_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="json: is not a regular file") as caught:
        read_json_file(tmp_path)
    assert_names_file(caught.value, tmp_path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"x\.json: json: is missing"):
        read_json_file(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, True), (10**30, True), (-1, False), (True, False), (False, False), (1.0, False), ("1", False), (None, False)],
    ids=repr,
)
def test_count_is_a_non_negative_integer(value: object, expected: bool) -> None:
    assert is_count(value) is expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "None"),
        ("a\nb", r"'a\nb'"),
        ("\u4e2d\ud800", r"'\u4e2d\ud800'"),
        ([1, {"a": 2}], "[1, {'a': 2}]"),
        ("x" * 78, "'" + "x" * 78 + "'"),
        ("x" * 79, "'" + "x" * 76 + "..."),
    ],
    ids=["none", "lines", "not-ascii", "nested", "fits", "cut"],
)
def test_shown_value_is_short_and_on_one_line(value: object, expected: str) -> None:
    assert short_repr(value) == expected
    assert len(expected) <= 80


def test_value_that_is_nested_too_deeply_to_be_shown_is_described() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    assert short_repr(value) == "a deeply nested list"


@settings(max_examples=200)
@given(value=st.lists(st.text('a,{["\\\\\n', max_size=9), max_size=9), nbytes=st.integers(1, 9))
def test_values_are_counted_outside_of_strings(value: list[str], nbytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strict_json, "_CHUNK_NBYTES", nbytes)
        counted = strict_json._count_values_outside_strings(json.dumps({"x": value}).encode())
    assert counted == 2 + max(len(value) - 1, 0)
