"""JSON objects as checkpoints hold them: one object, no duplicate keys, no NaN, bounded size and depth."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, TypeGuard

from ftw.errors import CheckpointError, printable

if TYPE_CHECKING:
    from pathlib import Path

MAX_NBYTES = 100_000_000  # the safetensors library's bound on a header, used for every JSON text
MAX_DEPTH = 128  # the bound of the safetensors library's parser; what is within it can be walked by recursion
_MAX_SHOWN = 80  # characters of a value in a message
_CONTAINERS = frozenset({dict, list})
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json_file(path: Path, *, allow_non_finite: bool = False) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Args:
        path: The file.
        allow_non_finite: Take NaN and infinities, which transformers writes into config.json (Nemotron-H's
            `time_step_limit`), although JSON has none.

    Raises:
        CheckpointError: It is no file, it is too large, or `parse_json_object` refuses its text.
    """
    if not path.is_file():
        raise CheckpointError(path, "json", "is not a regular file" if path.exists() else "is missing")
    with path.open("rb") as file:
        text = file.read(MAX_NBYTES + 1)
    if len(text) > MAX_NBYTES:
        raise CheckpointError(path, "json", f"is larger than {MAX_NBYTES} bytes")
    value = parse_json_object(text, path, "json", allow_non_finite=allow_non_finite)
    check_depth(value, path, "json")
    return value


def parse_json_object(
    text: bytes | memoryview, path: Path, subject: str, *, allow_non_finite: bool = False
) -> dict[str, Any]:
    """Parse UTF-8 text that holds one JSON object.

    Raises:
        CheckpointError: The text is not UTF-8, not JSON, not an object, nested too deeply to be parsed, or holds a key
            twice, half a surrogate pair, or, unless they are allowed, NaN or an infinity.
    """

    def pairs_to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CheckpointError(path, subject, f"key '{printable(duplicate)}' occurs twice, keys must be unique")
        return result

    def parse_float(number: str) -> float:
        value = float(number)
        if not math.isfinite(value) and not allow_non_finite:
            raise CheckpointError(path, subject, f"holds {shown(number)}, numbers must be finite")
        return value

    try:
        decoded = str(text, "utf-8")
        value = json.loads(
            decoded, object_pairs_hook=pairs_to_dict, parse_constant=parse_float, parse_float=parse_float
        )
    except UnicodeDecodeError as error:
        raise CheckpointError(path, subject, f"is not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(path, subject, f"is not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise CheckpointError(path, subject, "is nested too deeply") from error
    except CheckpointError:
        raise
    except ValueError as error:  # an integer of more than 4300 digits
        raise CheckpointError(path, subject, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(path, subject, f"holds a {type(value).__name__}, an object is needed")
    if _SURROGATE.search(decoded) and not _is_unicode(value):
        raise CheckpointError(path, subject, "holds half a surrogate pair, which is not Unicode")
    return value


def check_depth(value: dict[str, Any], path: Path, subject: str) -> None:
    """Check that containers are nested at most `MAX_DEPTH` deep, so that what comes after may walk them by recursion.

    Raises:
        CheckpointError: They are nested deeper.
    """
    if not _is_shallow(value):
        raise CheckpointError(path, subject, f"is nested more than {MAX_DEPTH} levels deep")


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


def shown(value: object) -> str:
    """Return a JSON value as a message shows it: in ASCII, on one line, and cut where it is long."""
    text = ascii(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def _is_shallow(value: dict[str, Any]) -> bool:
    """Tell whether containers are nested at most `MAX_DEPTH` deep, by one pass for each level."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        children = (item.values() if isinstance(item, dict) else item for item in level)
        level = [child for items in children for child in items if type(child) in _CONTAINERS]
        if not level:
            return True
    return False


def _is_unicode(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
