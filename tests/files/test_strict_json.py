"""Strict JSON: what is refused beyond Python's own parser, and how messages show what they found."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inspecting import assert_names_file

from ftw import CheckpointError
from ftw.files import strict_json
from ftw.files.strict_json import is_count, parse_json_object, read_json_file, short_repr

PATH = Path("/folder/file.json")

REFUSED = {
    "empty": (b"", "is not JSON: expecting value at character 0"),
    "blank": (b" \n", "is not JSON"),
    "cut": (b'{"a"', "is not JSON"),
    "trailing": (b"{} {}", "is not JSON: extra data at character 3"),
    "comment": (b"{} // no", "is not JSON: extra data"),
    "trailing_comma": (b'{"a":1,}', "is not JSON"),
    "single_quotes": (b"{'a':1}", "is not JSON"),
    "control_character": (b'{"a":"\n"}', "is not JSON: invalid control character"),
    "list": (b"[1]", "holds a list, an object is needed"),
    "text": (b'"a"', "holds a string, an object is needed"),
    "number": (b"1", "holds a number, an object is needed"),
    "null": (b"null", "holds null, an object is needed"),
    "bom": (b"\xef\xbb\xbf{}", "is not JSON"),
    "utf16": ("{}".encode("utf-16"), "is not UTF-8 at byte 0"),
    "latin1": (b'{"\xe9":1}', "is not UTF-8 at byte 2"),
    "utf8_surrogate": (b'{"\xed\xa0\x80":1}', "is not UTF-8 at byte 2"),
    "half_pair_key": (b'{"\\uD800":1}', "holds half a surrogate pair"),
    "half_pair_value": (b'{"a":[{"b":["x\\udfffy"]}]}', "holds half a surrogate pair"),
    "reversed_pair": (b'{"a":"\\udc00\\ud800"}', "holds half a surrogate pair"),
    "duplicate": (b'{"a":1,"a":1}', "key 'a' occurs twice, keys must be unique"),
    "duplicate_inside": (b'{"x":[{"b":1,"c":2,"b":3}]}', "key 'b' occurs twice"),
    "duplicate_by_escape": (b'{"a":1,"\\u0061":2}', "key 'a' occurs twice"),
    "duplicate_of_lines": (b'{"a\\n":1,"a\\n":2}', r"key 'a\\n' occurs twice"),
    "nan": (b'{"a":NaN}', "holds 'NaN', numbers must be finite"),
    "infinity": (b'{"a":[Infinity]}', "holds 'Infinity', numbers must be finite"),
    "minus_infinity": (b'{"a":-Infinity}', "holds '-Infinity', numbers must be finite"),
    "overflow": (b'{"a":1e999}', "holds '1e999', numbers must be finite"),
    "integer_of_5000_digits": (b'{"a":' + b"1" * 5000 + b"}", "holds an integer of more digits"),
    "pair_above_900_levels": (b'{"s":"\\ud83d\\ude00","x":' + b"[" * 900 + b"]" * 900 + b"}", "is nested too deeply"),
    "string_of_many_ways": (b'{"x":[' + b"1," * 400_000 + b'"' + b"a" * 200, "holds 400002 values in 800207 bytes"),
    "open_lists": (b'{"a":' + b"[" * 200_000, "is nested too deeply"),
}


@pytest.mark.parametrize(("text", "problem"), REFUSED.values(), ids=REFUSED)
def test_text_is_refused(text: bytes, problem: str) -> None:
    with pytest.raises(CheckpointError, match=f"subject: {problem}") as caught:
        parse_json_object(text, PATH, "subject")
    assert_names_file(caught.value, PATH)


ACCEPTED = {
    "empty_object": (b"{}", {}),
    "spaces": (b" \n{ } \t", {}),
    "values": (b'{"a":[1,-2.5,true,null,"x"],"b":{"a":1}}', {"a": [1, -2.5, True, None, "x"], "b": {"a": 1}}),
    "pair": (b'{"\\ud83d\\ude00":"\\uD83D\\uDE00"}', {"\U0001f600": "\U0001f600"}),
    "escaped_backslash": (b'{"a":"\\\\ud800"}', {"a": "\\ud800"}),
    "utf8": ('{"é":"\u4e2d"}'.encode(), {"é": "\u4e2d"}),
    "same_key_in_two_objects": (b'{"a":{"k":1},"b":{"k":2}}', {"a": {"k": 1}, "b": {"k": 2}}),
    "large_integer": (b'{"a":' + b"9" * 4000 + b"}", {"a": 10**4000 - 1}),
    "empty_key": (b'{"":1}', {"": 1}),
}  # fmt: skip


@pytest.mark.parametrize(("text", "value"), ACCEPTED.values(), ids=ACCEPTED)
def test_text_is_parsed(text: bytes, value: dict[str, Any]) -> None:
    assert parse_json_object(text, PATH, "subject") == value
    assert parse_json_object(memoryview(text), PATH, "subject") == value


def test_nesting_up_to_the_bound_is_parsed(tmp_path: Path) -> None:
    text = '{"a":' * 128 + "1" + "}" * 128
    (tmp_path / "file").write_text(text)
    assert json.dumps(read_json_file(tmp_path / "file"), separators=(",", ":")) == text


@pytest.mark.parametrize(
    "text", ['{"a":' * 129 + "1" + "}" * 129, '{"a":' + "[" * 128 + "]" * 128 + "}"], ids=["objects", "lists"]
)
def test_nesting_beyond_the_bound_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(CheckpointError, match="json: is nested too deeply, at most 128 levels"):
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
