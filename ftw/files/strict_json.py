"""JSON objects as checkpoints hold them: one object, no duplicate keys, no NaN, bounded size and depth."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from ftw.errors import CheckpointError
from ftw.files.file_signatures import find_impostor
from ftw.files.plain_file import open_plain_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

MAX_NBYTES = 100_000_000  # the safetensors library's bound on a header, used for every JSON text
MAX_DEPTH = (
    127  # of which the safetensors library's parser allows no more; what is within it can be walked by recursion
)
# What values may take: a container or a member takes up to 200 bytes, a byte of a text with wide characters in it 8,
# once in the text and once in the value.
_MAX_VALUES_NBYTES = 64 << 20
_VALUE_NBYTES = 200
_WIDE_NBYTES = 8
_CHUNK_NBYTES = 256 << 10
NESTED = f"is nested too deeply, at most {MAX_DEPTH} levels are allowed"
LONG_INTEGER = "holds an integer of more digits than Python converts, 4300"
_IMPOSTOR_NBYTES = 8
_MAX_SHOWN = 80  # characters of a value in a message
_CONTAINERS = frozenset({dict, list})
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json_list(path: Path, real: str | None = None) -> list[Any]:
    """Read a file that holds one JSON list; see `read_json_file`."""
    with open_json_file(path, real) as file:
        text = file.read()
    value = _parse_json(text, path, "json", allow_non_finite=False)
    if not isinstance(value, list):
        raise CheckpointError(path, "json", f"holds {json_type(value)}, a list is needed")
    return value


def read_json_file(path: Path, real: str | None = None, *, allow_non_finite: bool = False) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Args:
        path: The file.
        real: What `Roots.locate` says of it; None follows links to anywhere.
        allow_non_finite: Take NaN and infinities, which transformers writes into config.json (Nemotron-H's
            `time_step_limit`), although JSON has none.

    Raises:
        CheckpointError: It is not a file, it is too large, it changes, or `parse_json_object` refuses its text.
    """
    with open_json_file(path, real) as file:
        text = file.read()
    return parse_json_object(text, path, "json", allow_non_finite=allow_non_finite)


@contextlib.contextmanager
def open_json_file(path: Path, real: str | None = None) -> Iterator[BinaryIO]:
    """Open a file of JSON, and check at the end that it did not change meanwhile.

    Args:
        path: The file, which may stand in for one on the hub.
        real: What `Roots.locate` says of it; None follows links to anywhere.

    Raises:
        CheckpointError: It is not a file, it is too large, or it changes, also into a link.
    """
    if not path.is_file():
        raise CheckpointError(path, "json", "is not a regular file" if path.exists() else "is missing")
    with open_plain_file(path, real) if isinstance(path, Path) else path.open("rb") as file:
        before = _state(file)
        if before[0] > MAX_NBYTES:
            raise CheckpointError(path, "json", f"is larger than {MAX_NBYTES} bytes")
        impostor = find_impostor(file.read(_IMPOSTOR_NBYTES))
        if impostor:
            raise CheckpointError(path, "json", impostor)
        file.seek(0)
        yield file
        if _state(file) != before:
            raise CheckpointError(path, "json", "changed while it was being read")


def parse_json_object(
    text: bytes | memoryview, path: Path, subject: str, *, allow_non_finite: bool = False
) -> dict[str, Any]:
    """Parse UTF-8 text that holds one JSON object.

    Raises:
        CheckpointError: The text is not UTF-8, not JSON, not an object, nested deeper than `MAX_DEPTH`, of so many
            values that they would take more than 64 MiB, or holds a key twice, half a surrogate pair, or, unless they
            are allowed, NaN or an infinity.
    """
    value = _parse_json(text, path, subject, allow_non_finite=allow_non_finite)
    if not isinstance(value, dict):
        raise CheckpointError(path, subject, f"holds {json_type(value)}, an object is needed")
    return value


def _parse_json(text: bytes | memoryview, path: Path, subject: str, *, allow_non_finite: bool) -> Any:
    _check_cost(bytes(text), path, subject)
    try:
        decoded = str(text, "utf-8")
        value = make_decoder(path, subject, allow_non_finite=allow_non_finite).decode(decoded)
    except UnicodeDecodeError as error:
        raise CheckpointError(path, subject, f"is not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(path, subject, describe_json_error(error)) from error
    except RecursionError as error:
        raise CheckpointError(path, subject, NESTED) from error
    except CheckpointError:
        raise
    except ValueError as error:  # an integer of more than 4300 digits
        raise CheckpointError(path, subject, LONG_INTEGER) from error
    if not is_shallow(value):
        raise CheckpointError(path, subject, NESTED)
    if SURROGATE.search(decoded) and not is_unicode(value):
        raise CheckpointError(path, subject, "holds half a surrogate pair, which is not Unicode")
    return value


def make_decoder(
    path: Path, subject: str, *, allow_non_finite: bool = False, are_doubles: bool = False
) -> json.JSONDecoder:
    """Return a decoder that raises `CheckpointError` for a key that occurs twice and for what is not finite.

    Args:
        path: The file, for errors.
        subject: The part of it, for errors.
        allow_non_finite: Take NaN and infinities.
        are_doubles: Refuse an integer that is no finite double, too, and take -0 as a float: Python knows no such
            integer.
    """

    def pairs_to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CheckpointError(path, subject, duplicate_key(duplicate))
        return result

    def parse_float(number: str) -> float:
        value = float(number)
        if not math.isfinite(value) and not allow_non_finite:
            raise CheckpointError(path, subject, f"holds {short_repr(number)}, numbers must be finite")
        return value

    def parse_int(number: str) -> int | float:
        value = parse_float(number)
        return value if number == "-0" else int(number)

    return json.JSONDecoder(
        object_pairs_hook=pairs_to_dict,
        parse_constant=parse_float,
        parse_float=parse_float,
        parse_int=parse_int if are_doubles else None,
    )


def duplicate_key(key: str) -> str:
    """Return what is wrong with an object in which a key occurs twice."""
    return f"key {short_repr(key)} occurs twice, keys must be unique"


def describe_json_error(error: json.JSONDecodeError, start: int = 0) -> str:
    """Return what is wrong with text that begins at the character `start` of its file."""
    found = error.msg.removesuffix(" at")
    return f"is not JSON: {found[0].lower()}{found[1:]} at character {start + error.pos}"


def is_count(value: object) -> TypeGuard[int]:
    """Tell whether a JSON value is a non-negative integer; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def are_counts(value: object) -> TypeGuard[list[int]]:
    """Tell whether a JSON value is a list of non-negative integers; a header of 100,000 tensors asks 200,000 times."""
    if not isinstance(value, list):
        return False
    for item in value:  # a generator would take twice the time
        if type(item) is not int or item < 0:
            break
    else:
        return True
    return False


def is_shallow(value: object, depth: int = 0) -> bool:
    """Tell whether containers are nested at most `MAX_DEPTH` deep, so that what comes after may walk them by recursion.

    Args:
        value: A JSON value.
        depth: Number of containers that it lies in.
    """
    level: list[Any] = [value] if type(value) in _CONTAINERS else []
    for _ in range(depth, MAX_DEPTH):  # one pass for each level
        children = (item.values() if isinstance(item, dict) else item for item in level)
        level = [child for items in children for child in items if type(child) in _CONTAINERS]
        if not level:
            return True
    return not level


def is_unicode(value: object) -> bool:
    """Tell whether all texts of a value, which `is_shallow` allows, are Unicode; half a surrogate pair is not."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def json_type(value: object) -> str:
    """Return what a JSON value is, as a message names it."""
    if isinstance(value, (dict, list, str)):
        return "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else "a string"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else "a number"


def short_repr(value: object) -> str:
    """Return a JSON value as a message shows it: in ASCII, on one line, cut if it is long."""
    try:
        text = ascii(value)
    except RecursionError:  # within the bound of the parser, which nests a little deeper
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def _state(file: BinaryIO) -> tuple[int, int]:
    """Return size and time of the last change of a file, or of the content of one that was fetched."""
    if isinstance(file, io.BytesIO):
        return len(file.getbuffer()), 0
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _check_cost(text: bytes, path: Path, subject: str) -> None:
    """Check that the values of a text will not take more memory than is allowed, before they take it."""
    width = 1 if text.isascii() and b"\\u" not in text else _WIDE_NBYTES
    budget = _MAX_VALUES_NBYTES - width * len(text)
    count = _count_values(text)
    if count * _VALUE_NBYTES > budget:
        count = _count_values_outside_strings(text)  # commas in texts are none that part values
    if count * _VALUE_NBYTES > budget:
        problem = f"holds {count} values in {len(text)} bytes, which could take more than {_MAX_VALUES_NBYTES} bytes"
        raise CheckpointError(path, subject, f"{problem} of memory")


def _count_values(text: bytes) -> int:
    return text.count(b",") + text.count(b"{") + text.count(b"[")


def _count_values_outside_strings(text: bytes) -> int:
    """Count by one pass, chunk by chunk: a pattern for strings takes time or memory that grows faster than the text."""
    count, is_inside, left = 0, False, b""
    for start in range(0, len(text), _CHUNK_NBYTES):
        chunk = (left + text[start : start + _CHUNK_NBYTES]).replace(b"\\\\", b"")
        left = b"\\" if chunk.endswith(b"\\") else b""  # escapes what begins the next chunk
        pieces = chunk.removesuffix(left).replace(b'\\"', b"").split(b'"')
        count += _count_values(b"".join(pieces[is_inside::2]))
        is_inside ^= len(pieces) % 2 == 0
    return count
