"""JsonStream gives what the json module gives, wherever its windows end, and refuses what `strict_json` refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from amounts import IS_WHOLE
from hypothesis import given, settings
from hypothesis import strategies as st
from json_cases import ACCEPTED, REFUSED

from ftw import CheckpointError
from ftw.files import json_stream
from ftw.files.json_stream import MAX_KEY, JsonStream
from ftw.files.strict_json import MAX_DEPTH

PATH = Path("/folder/file.json")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=4), children, max_size=4),
    max_leaves=12,
)


def stream_of(text: bytes, nbytes: int = 1 << 20) -> JsonStream:
    """Return a stream that is given at most `nbytes` bytes at a time."""
    left = [text]

    def read(wanted: int) -> bytes:
        wanted = min(wanted, nbytes)
        content, left[0] = left[0][:wanted], left[0][wanted:]
        return content

    return JsonStream(read, PATH, "subject")


def walk(stream: JsonStream) -> dict[str, Any]:
    """Return the object, walking what lies in it where it is an object or a list."""
    found: dict[str, Any] = {}
    for key in stream.iter_members():
        kind = stream.kind()
        if kind == "an object":
            found[key] = {name: stream.read_value() for name in stream.iter_members()}
        elif kind == "a list":
            found[key] = [stream.read_value() for _ in stream.iter_elements()]
        else:
            found[key] = stream.read_value()
    stream.finish()
    return found


@settings(max_examples=200)
@given(value=st.dictionaries(st.text(max_size=4), VALUES, max_size=5), nbytes=st.integers(1, 9), data=st.data())
def test_windows_of_any_size_give_the_same_values(value: dict[str, Any], nbytes: int, data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.sampled_from([None, 1])))
    assert walk(stream_of(text.encode(), nbytes)) == value


@pytest.mark.parametrize("nbytes", [1, 3, 1 << 20], ids=str)
@pytest.mark.parametrize("text", [text for text, _ in REFUSED.values()], ids=REFUSED)
def test_text_that_strict_json_refuses_is_refused(text: bytes, nbytes: int) -> None:
    nbytes = nbytes if len(text) < 100_000 or IS_WHOLE else max(nbytes, 64)
    with pytest.raises(CheckpointError, match=r"/folder/file\.json: subject: ") as caught:
        walk(stream_of(text, nbytes))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("nbytes", [1, 3, 1 << 20], ids=str)
@pytest.mark.parametrize(("text", "value"), ACCEPTED.values(), ids=ACCEPTED)
def test_text_that_strict_json_parses_is_parsed(text: bytes, value: dict[str, Any], nbytes: int) -> None:
    assert walk(stream_of(text, nbytes)) == value


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b'{"a" 1}', "expecting ':' delimiter at character 5"),
        (b'{"a":1 "b":2}', "expecting ',' delimiter at character 7"),
        (b'{"a":1,}', "expecting a property name in double quotes at character 7"),
        (b'{"a":[1 2]}', "expecting ',' delimiter at character 8"),
        (b'{"a":[1,]}', "expecting value at character 8"),
        (b'{"a":tru}', "expecting value at character 5"),
        (b'{"a":1', "expecting ',' delimiter at character 6"),
        (b'{"a":"' + b"x" * 50, "unterminated string starting at character 5"),
        ('{"é":x}'.encode(), "expecting value at character 5"),
    ],
    ids="colon comma trailing list trailing-list literal end string wide".split(),
)
@pytest.mark.parametrize("nbytes", [1, 1 << 20], ids=str)
def test_place_of_an_error_does_not_depend_on_windows(text: bytes, problem: str, nbytes: int) -> None:
    with pytest.raises(CheckpointError, match=f"subject: is not JSON: {problem}$"):
        walk(stream_of(text, nbytes))


def test_value_of_any_length_up_to_the_bound_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "WINDOW_NBYTES", 16)
    monkeypatch.setattr(json_stream, "MAX_VALUE", 64)
    monkeypatch.setattr(json_stream, "MAX_STRING", 256)
    assert walk(stream_of(b'{"a":{"b":[' + b"1," * 20 + b'1]}, "c":"' + b"x" * 200 + b'"}'))["c"] == "x" * 200
    for text in (b'{"a":{"b":[' + b"1," * 90 + b'1]}, "c":1}', b'{"a":"' + b"x" * 600 + b'"}'):
        with pytest.raises(
            CheckpointError, match=r"holds more than (64|256) characters in one value, at character \d+"
        ):
            walk(stream_of(text))


@pytest.mark.parametrize("window", [16, 32, 1 << 10], ids=str)
@pytest.mark.parametrize(("value", "limit"), [(b'"%s"', 256), (b"1%s", 64)], ids="text number".split())
def test_bound_of_a_value_does_not_depend_on_windows(
    monkeypatch: pytest.MonkeyPatch, value: bytes, limit: int, window: int
) -> None:
    monkeypatch.setattr(json_stream, "WINDOW_NBYTES", window)
    monkeypatch.setattr(json_stream, "MAX_VALUE", 64)
    monkeypatch.setattr(json_stream, "MAX_STRING", 256)
    digits = b"1" * (limit - len(value) + 2)
    walk(stream_of(b'{"a":%s, "b":1}' % (value % digits)))
    with pytest.raises(CheckpointError, match=f"holds more than {limit} characters in one value, at character 5"):
        walk(stream_of(b'{"a":%s, "b":1}' % (value % (digits + b"1"))))


@pytest.mark.parametrize("number", ["-0", "1" + "0" * 308, "-" + "9" * 308, "0" + "." + "0" * 400 + "1"], ids=len)
def test_number_that_a_double_holds_is_read(number: str) -> None:
    found = walk(stream_of(b'{"a":[%s]}' % number.encode()))["a"][0]
    assert float(found) == float(number)
    assert isinstance(found, float) is ("." in number or number == "-0")


@pytest.mark.parametrize("digits", [310, 4300], ids=str)
def test_integer_that_no_double_holds_is_refused(digits: int) -> None:
    with pytest.raises(CheckpointError, match=r"holds '-?1+\.\.\., numbers must be finite"):
        walk(stream_of(b'{"a":[-%s]}' % (b"1" * digits)))


@pytest.mark.parametrize("text", [b"[1]", b'"x"', b"1", b"null", b"true"], ids=str)
def test_kinds_are_named(text: bytes) -> None:
    names = {"[": "a list", '"': "a string", "1": "a number", "n": "null", "t": "true"}
    assert stream_of(text).describe() == names[chr(text[0])]


@pytest.mark.parametrize("levels", [126, 127], ids=str)
def test_nesting_counts_what_is_walked(levels: int) -> None:
    text = b'{"a":[' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"]}"
    if levels < MAX_DEPTH:
        walk(stream_of(text))
        return
    with pytest.raises(CheckpointError, match="subject: is nested too deeply, at most 127 levels"):
        walk(stream_of(text))


@pytest.mark.parametrize("text", [b'{"%s":1}', b'{"a":1,"%s":1}', b'{"\\u0061%s":1}'], ids="first next escaped".split())
def test_key_that_is_too_long_is_refused(text: bytes) -> None:
    assert list(walk(stream_of(text % (b"k" * (MAX_KEY - 6)))).values())[-1] == 1
    with pytest.raises(CheckpointError, match=r"holds (a key of )?more than 655"):
        walk(stream_of(text % (b"k" * (MAX_KEY + 1))))
